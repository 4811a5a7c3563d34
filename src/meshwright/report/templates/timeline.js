"use strict";
// The timeline of a simulated step: rows of actions on a canvas, zoomed and panned in time. A row is a rank with
// actions on microbatches; or, where `names` are given, a clock with events of these names.
(() => {
  const $ = (id) => document.getElementById(id);
  const data = JSON.parse($("data").textContent);
  const unpack = (packed) => new Uint32Array(Uint8Array.from(atob(packed), (c) => c.charCodeAt(0)).buffer);
  const codes = unpack(data.codes), microbatches = unpack(data.microbatches);
  const start = unpack(data.start), end = unpack(data.end);
  const TICKS = 2 ** 32 - 1, ranks = data.counts.length, KINDS = data.kinds.length;
  const first = [0];
  for (const count of data.counts) first.push(first[first.length - 1] + count);
  const finals = data.final.map((times) => times.map((t) => (t / data.makespan) * TICKS));

  const names = data.names || null, rowName = (rank) => (data.rows ? data.rows[rank] : "rank " + rank);
  const LEFT = data.rows ? 12 + 6.2 * Math.max(...data.rows.map((name) => name.length)) : 56, RIGHT = 64, PAD = 2;
  const within = document.querySelector("[data-within]") !== null;
  const rowHeight = Math.max(16, Math.min(within ? 36 : 52, Math.floor(560 / ranks)));
  const rows = $("rows"), frame = $("frame"), axis = $("axis"), tip = $("tip");
  let width = 0, from = 0, to = TICKS, hovered = -1, selected = -1, colours = null, asked = false;

  // Colours: a kind has one of Okabe and Ito's (2008), which people tell apart with any colour vision. Later
  // chunks of a rank are darker, and hatched.
  const numbers = (css) => {
    const probe = document.createElement("canvas").getContext("2d");
    probe.fillStyle = css;
    return [1, 3, 5].map((i) => parseInt(probe.fillStyle.slice(i, i + 2), 16));
  };
  const mix = (a, b, share) => a.map((value, i) => Math.round(value * (1 - share) + b[i] * share));
  const css = (rgb) => "rgb(" + rgb.join(" ") + ")";
  const readColours = () => {
    const style = getComputedStyle(document.documentElement);
    const of = (name) => numbers(style.getPropertyValue("--" + name).trim());
    const ink = of("ink"), kinds = data.colours.map(of);
    colours = { ink: css(ink), soft: css(of("soft")), grid: css(of("grid")), card: css(of("card")), final: css(of("k-final")) };
    colours.idle = of("grid");
    colours.rgb = [];
    for (let chunk = 0; chunk < data.virtual; chunk++) {
      for (const kind of kinds) colours.rgb.push(mix(kind, [0, 0, 0], data.virtual > 1 ? (0.3 * chunk) / (data.virtual - 1) : 0));
    }
    colours.css = colours.rgb.map(css);
    // White or black, whichever stands out more from a colour (relative luminance of WCAG 2).
    const linear = (v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4);
    const luminance = (rgb) => 0.2126 * linear(rgb[0]) + 0.7152 * linear(rgb[1]) + 0.0722 * linear(rgb[2]);
    colours.text = colours.rgb.map((rgb) => (luminance(rgb) > 0.179 ? "#000" : "#fff"));
  };
  // Diagonal lines over a box, in which its number stays readable.
  const hatch = (context, left, y, right, height) => {
    context.save();
    context.beginPath();
    context.rect(left, y, right - left, height);
    context.clip();
    context.strokeStyle = "rgb(255 255 255 / 55%)";
    context.lineWidth = 1.4;
    context.beginPath();
    for (let at = left - height; at < right; at += 6) { context.moveTo(at, y + height); context.lineTo(at + height, y); }
    context.stroke();
    context.restore();
  };
  // The number of a microbatch: across, smaller, or upright where the box is narrow; a pointer reads out the rest.
  const label = (context, words, left, right, y, height, code) => {
    const across = context.measureText(words).width, room = right - left, small = 9;
    const upright = across + 5 > room;
    if (upright && (room < small || across * 0.9 + 4 > height)) return;
    context.save();
    context.translate((left + right) / 2, y + height / 2 + 0.5);
    if (upright) { context.rotate(-Math.PI / 2); context.font = small + "px system-ui, sans-serif"; }
    if (codes[code] >= KINDS) {
      context.fillStyle = colours.css[codes[code]];
      const w = (upright ? across * 0.9 : across) + 3;
      context.fillRect(-w / 2, -6, w, 12);
    }
    context.fillStyle = colours.text[codes[code]];
    context.fillText(words, 0, 0);
    context.restore();
  };

  const UNITS = [[1, "s"], [1e-3, "ms"], [1e-6, "us"], [1e-9, "ns"]];
  const unitOf = (seconds) => UNITS.find(([scale]) => seconds >= scale) || UNITS[3];
  const time = (ticks, digits = 5) => {
    const seconds = (ticks / TICKS) * data.makespan, [scale, unit] = unitOf(Math.abs(seconds) || 1);
    return Number((seconds / scale).toPrecision(digits)) + " " + unit;
  };
  const plot = () => width - LEFT - RIGHT;
  const x = (ticks) => LEFT + ((ticks - from) / (to - from)) * plot();
  const ticksAt = (px) => from + ((px - LEFT) / plot()) * (to - from);

  // The first action of a rank that ends after a time.
  const firstAfter = (rank, ticks) => {
    let low = first[rank], high = first[rank + 1];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (end[middle] <= ticks) low = middle + 1; else high = middle;
    }
    return low;
  };

  // Where actions are narrower than some pixels: each pixel has the mean colour of what it covers.
  const strip = document.createElement("canvas");
  const drawDense = (context, rank, a, b, y, height) => {
    const columns = Math.max(1, Math.round(plot())), step = (to - from) / columns;
    if (strip.width !== columns) { strip.width = columns; strip.height = 1; }
    const image = strip.getContext("2d").createImageData(columns, 1);
    let at = a;
    for (let column = 0; column < columns; column++) {
      const left = from + column * step, right = left + step;
      let red = 0, green = 0, blue = 0, covered = 0;
      while (at < b && end[at] <= left) at++;
      for (let i = at; i < b && start[i] < right; i++) {
        const part = Math.min(end[i], right) - Math.max(start[i], left), rgb = colours.rgb[codes[i]];
        red += rgb[0] * part; green += rgb[1] * part; blue += rgb[2] * part; covered += part;
      }
      const rest = Math.max(0, step - covered), pixel = 4 * column;
      image.data[pixel] = (red + colours.idle[0] * rest) / step;
      image.data[pixel + 1] = (green + colours.idle[1] * rest) / step;
      image.data[pixel + 2] = (blue + colours.idle[2] * rest) / step;
      image.data[pixel + 3] = 255;
    }
    strip.getContext("2d").putImageData(image, 0, 0);
    context.drawImage(strip, 0, 0, columns, 1, LEFT, y, plot(), height);
  };

  const drawActions = (context, a, b, y, height) => {
    for (let i = a; i < b; i++) {
      const left = Math.max(LEFT, x(start[i])), right = Math.min(width - RIGHT, x(end[i]));
      const gap = right - left > 5 ? 1 : 0;
      context.fillStyle = colours.css[codes[i]];
      context.fillRect(left, y, Math.max(0.5, right - left - gap), height);
      if (codes[i] >= KINDS && right - left > 7) hatch(context, left, y, right - gap, height);
      if (!names && height > 10) label(context, String(microbatches[i]), left, right - gap, y, height, i);
      if (microbatches[i] === hovered || i === selected) {
        context.strokeStyle = colours.ink;
        context.lineWidth = i === selected ? 3 : 2;
        context.strokeRect(left + 1, y + 1, Math.max(1, right - left - gap - 2), height - 2);
      }
    }
  };

  const drawFinal = (context, rank, y, height) => {
    const [begin, stop] = finals[rank], left = Math.max(LEFT, x(begin)), right = Math.min(width - RIGHT, x(stop));
    if (right <= left) return;
    context.fillStyle = colours.final;
    context.fillRect(left, y, right - left, height);
  };

  const drawRow = (context, rank) => {
    const y = rank * rowHeight + PAD / 2, height = rowHeight - PAD;
    const a = firstAfter(rank, from);
    let b = firstAfter(rank, to);
    if (b < first[rank + 1] && start[b] < to) b++;
    context.fillStyle = css(colours.idle);
    context.fillRect(LEFT, y, plot(), height);
    if (b - a > plot() / 3) drawDense(context, rank, a, b, y, height);
    else drawActions(context, a, b, y, height);
    drawFinal(context, rank, y, height);
  };

  const drawNames = (context) => {
    context.fillStyle = colours.soft;
    context.textAlign = "right";
    for (let rank = 0; rank < ranks; rank++) {
      const y = (rank + 0.5) * rowHeight + 0.5;
      context.fillText(rowName(rank), LEFT - 8, y);
      context.fillText((100 * data.bubbles[rank]).toFixed(1) + "%", width - 8, y);
    }
  };

  const drawAxis = () => {
    const context = prepare(axis, 22), span = ((to - from) / TICKS) * data.makespan;
    const rough = span / Math.max(2, plot() / 110), power = 10 ** Math.floor(Math.log10(rough || 1));
    const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough), scale = TICKS / data.makespan;
    const [unit, name] = unitOf((to / TICKS) * data.makespan);
    const digits = Math.max(0, -Math.floor(Math.log10(step / unit) + 1e-9));
    for (let n = Math.ceil(from / scale / step); n * step * scale <= to; n++) {
      const at = x(n * step * scale);
      context.fillStyle = colours.grid;
      context.fillRect(at, 16, 1, 6);
      context.fillStyle = colours.soft;
      context.fillText(((n * step) / unit).toFixed(digits) + " " + name, Math.max(at, LEFT), 8);
    }
    context.textAlign = "right";
    context.fillText("idle", width - 8, 8);
  };

  // A canvas as wide as its place and sharp on its screen.
  const prepare = (canvas, height) => {
    const density = window.devicePixelRatio || 1, context = canvas.getContext("2d");
    const columns = Math.round(width * density), lines = Math.round(height * density);
    if (canvas.width !== columns || canvas.height !== lines) {
      canvas.width = columns;
      canvas.height = lines;
      canvas.style.height = height + "px";
    }
    context.setTransform(density, 0, 0, density, 0, 0);
    context.clearRect(0, 0, width, height);
    context.font = (rowHeight < 16 ? 10 : 11) + "px system-ui, sans-serif";
    context.textAlign = "center";
    context.textBaseline = "middle";
    return context;
  };

  const draw = () => {
    asked = false;
    width = axis.clientWidth;
    drawAxis();
    const context = prepare(rows, ranks * rowHeight);
    drawNames(context);
    context.save();
    context.beginPath();
    context.rect(LEFT, 0, plot(), ranks * rowHeight);
    context.clip();
    context.textAlign = "center";
    for (let rank = 0; rank < ranks; rank++) drawRow(context, rank);
    context.restore();
  };
  const ask = () => { if (!asked) { asked = true; requestAnimationFrame(draw); } };

  // The window in time: never outside the step, and never closer than a millionth of it.
  const show = (left, right) => {
    const span = Math.min(TICKS, Math.max(TICKS / 1e6, right - left));
    from = Math.min(Math.max(0, left), TICKS - span);
    to = from + span;
    ask();
  };
  const zoom = (factor, ticks = (from + to) / 2) => show(ticks - (ticks - from) * factor, ticks + (to - ticks) * factor);
  const pan = (share) => show(from + share * (to - from), to + share * (to - from));
  const fit = () => show(0, TICKS);

  const legend = () => {
    const used = new Set(codes), items = [];
    data.kinds.forEach(([letter, words], kind) => {
      for (let chunk = 0; chunk < data.virtual; chunk++) {
        // Of more than two chunks the first and the last: the others are between.
        if (!used.has(KINDS * chunk + kind) || (chunk > 0 && chunk < data.virtual - 1)) continue;
        const which = data.virtual > 1 ? ", chunk " + chunk : "";
        items.push([colours.css[KINDS * chunk + kind], names ? words : words + " (" + letter + ")" + which, chunk > 0]);
      }
    });
    if (finals.some(([a, b]) => b > a)) items.push([colours.final, "final step", false]);
    items.push([css(colours.idle), "idle", false]);
    $("legend").replaceChildren(...items.map(([colour, words, hatched]) => {
      const item = document.createElement("span"), box = document.createElement("i");
      box.style.backgroundColor = colour;
      box.classList.toggle("hatched", hatched);
      item.append(box, words);
      return item;
    }));
  };

  // What a rank does at a time: [bold, plain, the microbatch or -1].
  const told = (rank, ticks) => {
    const i = firstAfter(rank, ticks);
    const [begin, stop] = finals[rank];
    if (ticks >= begin && ticks < stop) return ["final step", rowName(rank) + ", " + time(stop - begin), -1];
    if (i < first[rank + 1] && start[i] <= ticks) {
      const kind = data.kinds[codes[i] % KINDS], when = time(start[i]) + " + " + time(end[i] - start[i]);
      if (names) return [names[microbatches[i]], kind[1] + ", " + rowName(rank) + ", " + when, microbatches[i]];
      const stage = data.stages[rank][Math.floor(codes[i] / KINDS)];
      const name = kind[0] + stage + "." + microbatches[i] + "  " + kind[1];
      const place = "rank " + rank + ", stage " + stage + ", microbatch " + microbatches[i];
      return [name, place + ", " + when, microbatches[i]];
    }
    const after = i < first[rank + 1] ? start[i] : TICKS;
    const before = i > first[rank] ? (i < first[rank + 1] ? end[i - 1] : stop) : 0;
    return ["idle", rowName(rank) + ", " + time(after - before), -1];
  };
  const point = (event) => {
    const box = rows.getBoundingClientRect(), px = event.clientX - box.left;
    const rank = Math.floor((event.clientY - box.top) / rowHeight);
    const inside = px >= LEFT && px < width - RIGHT && rank >= 0 && rank < ranks;
    tip.classList.toggle("shown", inside);
    if (!inside) return hover(-1);
    return hover(tell(rank, ticksAt(px), event.clientX + 14, event.clientY + 18));
  };
  // Show what a rank does at a time beside a place of the window; the microbatch, or -1.
  const tell = (rank, ticks, left, top) => {
    const [bold, plain, microbatch] = told(rank, ticks);
    const strong = document.createElement("b"), line = document.createElement("span");
    strong.textContent = bold;
    line.textContent = plain;
    tip.replaceChildren(strong, line);
    const card = tip.parentElement.getBoundingClientRect(), room = card.width - tip.offsetWidth - 8;
    tip.style.transform = "translate(" + Math.max(8, Math.min(left - card.left, room)) + "px, " + (top - card.top) + "px)";
    return microbatch;
  };
  // Choose an action by keyboard: the next or the one before on its rank, or the one at its time on another rank.
  const rankOf = (action) => first.findIndex((at) => at > action) - 1;
  const choose = (action) => {
    selected = action;
    const rank = rankOf(action), middle = (start[action] + end[action]) / 2;
    if (start[action] < from || end[action] > to) show(middle - (to - from) / 2, middle + (to - from) / 2);
    const top = rank * rowHeight;
    if (top < frame.scrollTop) frame.scrollTop = top;
    if (top + rowHeight > frame.scrollTop + frame.clientHeight) frame.scrollTop = top + rowHeight - frame.clientHeight;
    const box = rows.getBoundingClientRect();
    tip.classList.add("shown");
    hovered = tell(rank, middle, box.left + x(middle), box.top + top + rowHeight + 4);
    ask();
  };
  const along = (by) => {
    if (selected < 0) return choose(first[0]);
    const rank = rankOf(selected);
    return choose(Math.max(first[rank], Math.min(first[rank + 1] - 1, selected + by)));
  };
  const across = (by) => {
    if (selected < 0) return choose(first[0]);
    const rank = Math.max(0, Math.min(ranks - 1, rankOf(selected) + by));
    return choose(Math.min(first[rank + 1] - 1, firstAfter(rank, start[selected])));
  };
  const unchoose = () => { selected = -1; tip.classList.remove("shown"); hover(-1); ask(); };
  const hover = (microbatch) => { if (microbatch !== hovered) { hovered = microbatch; ask(); } };

  let held = null;
  rows.addEventListener("pointerdown", (event) => {
    held = { x: event.clientX, y: event.clientY, top: frame.scrollTop, from, to };
    rows.setPointerCapture(event.pointerId);
    rows.classList.add("held");
  });
  rows.addEventListener("pointermove", (event) => {
    if (held) {
      const moved = ((held.x - event.clientX) / plot()) * (held.to - held.from);
      show(held.from + moved, held.to + moved);
      frame.scrollTop = held.top + held.y - event.clientY;
    }
    point(event);
  });
  const release = () => { held = null; rows.classList.remove("held"); };
  rows.addEventListener("pointerup", release);
  rows.addEventListener("pointercancel", release);
  rows.addEventListener("pointerleave", () => { tip.classList.remove("shown"); hover(-1); });
  rows.addEventListener("wheel", (event) => {
    if (within && !event.ctrlKey) return; // the page scrolls
    event.preventDefault();
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      pan((event.deltaX || event.deltaY) / plot());
    } else {
      zoom(Math.exp(Math.max(-200, Math.min(200, event.deltaY)) / 400), ticksAt(event.clientX - rows.getBoundingClientRect().left));
    }
    point(event);
  }, { passive: false });
  const KEYS = {
    ArrowLeft: () => pan(-0.1),
    ArrowRight: () => pan(0.1),
    ArrowUp: () => frame.scrollBy(0, -4 * rowHeight),
    ArrowDown: () => frame.scrollBy(0, 4 * rowHeight),
    "+": () => zoom(0.7),
    "=": () => zoom(0.7),
    "-": () => zoom(1 / 0.7),
    0: fit,
    Home: fit,
    n: () => along(1),
    p: () => along(-1),
    j: () => across(1),
    k: () => across(-1),
    Escape: unchoose,
  };
  document.addEventListener("keydown", (event) => {
    const act = KEYS[event.key], upright = event.key === "ArrowUp" || event.key === "ArrowDown";
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    if (within && document.activeElement !== rows) return;
    if (upright && frame.scrollHeight <= frame.clientHeight) return; // all ranks are in sight: the page scrolls
    event.preventDefault();
    act();
  });
  rows.addEventListener("blur", unchoose);
  // Each action as a row of a table, in seconds.
  const listed = () => {
    const lines = [names ? "clock,kind,name,start_s,end_s" : "rank,kind,stage,microbatch,start_s,end_s"];
    const quoted = (text) => '"' + text.replaceAll('"', '""') + '"', seconds = (ticks) => ((ticks / TICKS) * data.makespan).toPrecision(9);
    for (let rank = 0; rank < ranks; rank++) {
      for (let i = first[rank]; i < first[rank + 1]; i++) {
        const kind = data.kinds[codes[i] % KINDS][0], when = [seconds(start[i]), seconds(end[i])];
        const what = names ? [quoted(rowName(rank)), kind, quoted(names[microbatches[i]])]
          : [rank, kind, data.stages[rank][Math.floor(codes[i] / KINDS)], microbatches[i]];
        lines.push([...what, ...when].join(","));
      }
    }
    return lines.join("\n") + "\n";
  };
  $("csv").addEventListener("click", () => window.meshwrightSave("timeline.csv", "text/csv", listed()));
  $("in").addEventListener("click", () => zoom(0.5));
  $("out").addEventListener("click", () => zoom(2));
  $("fit").addEventListener("click", fit);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readColours(); legend(); ask(); });
  new ResizeObserver(ask).observe(axis);

  readColours();
  legend();
  draw();
  document.documentElement.dataset.ready = "true";
})();

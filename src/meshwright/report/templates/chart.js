"use strict";
// Line charts: the read-out of the nearest recorded step, and the switch of all to tokens or time.
(() => {
  const WIDTH = 1000;
  const round = (v) =>
    Math.abs(v) >= 10000 ? Math.round(v).toLocaleString("en")
      : Math.abs(v) < 0.001 && v !== 0 ? v.toExponential(3) : String(Number(v.toPrecision(5)));
  const two = (n) => String(n).padStart(2, "0");
  const clock = (s) => {
    const whole = Math.round(s), h = Math.floor(whole / 3600), m = Math.floor(whole / 60) % 60;
    return h ? h + ":" + two(m) + ":" + two(whole % 60) : m + ":" + two(whole % 60);
  };
  const short = (v) => {
    const [scale, unit] = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]].find(([n]) => v >= n) || [1, ""];
    return Number((v / scale).toPrecision(4)) + unit;
  };
  // What each horizontal axis is called, how a value of it is written, and what steps its ticks take.
  const AXES = {
    step: { name: "step", write: (v) => Math.round(v).toLocaleString("en"), label: short, steps: [1, 2, 5, 10] },
    tokens: { name: "tokens", write: (v) => short(v) + " tokens", label: short, steps: [1, 2, 2.5, 5, 10] },
    time: { name: "time in training", write: clock, label: clock, steps: null },
  };
  const SECONDS = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 43200, 86400];
  const ticks = (low, high, most, steps) => {
    const rough = (high - low) / most, power = 10 ** Math.floor(Math.log10(rough || 1));
    const listed = steps ? steps.map((n) => n * power) : SECONDS;
    const step = listed.find((n) => n >= rough * 0.999) || Math.ceil(rough / 86400) * 86400, marks = [];
    for (let n = Math.ceil(low / step - 1e-9); n * step <= high * (1 + 1e-9); n++) marks.push(n * step);
    return marks;
  };

  const table = document.getElementById("axes"), runs = table ? JSON.parse(table.textContent) : [];
  let axis = "step";
  // The value of the present axis at a step of a run, between the steps that the page has it of.
  const valueAt = (run, step) => {
    if (axis === "step") return step;
    const { step: steps, [axis]: values } = runs[run];
    let low = 0, high = steps.length - 1;
    if (step <= steps[0]) return values[0];
    if (step >= steps[high]) return values[high];
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (steps[middle] <= step) low = middle; else high = middle;
    }
    return values[low] + ((step - steps[low]) / (steps[high] - steps[low])) * (values[high] - values[low]);
  };

  // The index of the place that is nearest to a share of the width; places ascend.
  const nearest = (places, share) => {
    let low = 0, high = places.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (places[middle] < share) low = middle + 1; else high = middle;
    }
    return low > 0 && share - places[low - 1] <= places[low] - share ? low - 1 : low;
  };
  const element = (kind, css, parent) => {
    const made = document.createElement(kind);
    made.className = css;
    parent.append(made);
    return made;
  };

  const csv = (data) => {
    const rows = new Map(), known = ["tokens", "time"].filter((name) => runs.length === 1 && runs[0][name]);
    data.series.forEach((series, place) => series.x.forEach((step, i) => {
      if (!rows.has(step)) rows.set(step, Array(data.series.length).fill(""));
      if (series.y[i] !== null) rows.get(step)[place] = series.y[i];
    }));
    const quoted = (text) => '"' + text.replaceAll('"', '""') + '"', before = axis;
    const extra = (step) => known.map((name) => { axis = name; return Number(valueAt(0, step).toFixed(3)); });
    const lines = [["step", ...known.map((name) => (name === "time" ? "seconds" : name)), ...data.series.map((s) => quoted(s.name))]];
    for (const step of [...rows.keys()].sort((a, b) => a - b)) lines.push([step, ...extra(step), ...rows.get(step)]);
    axis = before;
    return lines.map((line) => line.join(",")).join("\n") + "\n";
  };

  const attach = (figure) => {
    const data = JSON.parse(figure.querySelector("script").textContent);
    const frame = figure.querySelector(".frame"), main = data.series.find((s) => s.x.length);
    const [left, right] = data.x;
    const rule = element("div", "rule", frame), tip = element("div", "tip", frame);
    tip.id = figure.dataset.chart + "-tip";
    tip.setAttribute("aria-live", "polite");
    const dots = data.series.map((s) => element("i", "dot c" + s.colour, frame));
    const drawn = [...figure.querySelectorAll("path[data-run]")].map((path) => [path, path.getAttribute("d")]);
    const labels = [...frame.querySelectorAll(".x")].map((label) => label.cloneNode(true));
    const scale = () => {
      const log = figure.querySelector(".pick-log");
      return data.scales[log && log.checked ? "log" : "linear"];
    };
    const height = (s, v) =>
      s.log ? Math.log(v / s.low) / Math.log(s.high / s.low) : (v - s.low) / (s.high - s.low);
    let low = left, high = right, places = [], here = null;
    const share = (run, step) => (high > low ? (valueAt(run, step) - low) / (high - low) : 0.5);

    const lay = () => {
      const ends = data.series.filter((s) => s.x.length).map((s) => [valueAt(s.run, s.x[0]), valueAt(s.run, s.x[s.x.length - 1])]);
      low = axis === "step" ? left : left === 0 ? 0 : Math.min(...ends.map((e) => e[0]));
      high = axis === "step" ? right : Math.max(...ends.map((e) => e[1]));
      places = data.series.map((s) => s.x.map((step) => share(s.run, step)));
      for (const [path, d] of drawn) {
        const moved = (_, letter, x) => letter + (share(Number(path.dataset.run), left + (x / WIDTH) * (right - left)) * WIDTH).toFixed(1);
        path.setAttribute("d", axis === "step" ? d : d.replace(/([ML])(-?[\d.]+)/g, moved));
      }
      frame.querySelectorAll(".x").forEach((label) => label.remove());
      if (axis === "step") frame.append(...labels);
      else for (const mark of ticks(low, high, figure.classList.contains("wide") ? 6 : 3, AXES[axis].steps)) {
        const label = element("span", "x", frame);
        label.textContent = AXES[axis].label(mark);
        label.style.left = 100 * ((mark - low) / (high - low || 1)) + "%";
      }
      frame.querySelector(".axis-name").textContent = AXES[axis].name;
      hide();
    };

    const show = (index) => {
      here = index;
      const own = places[data.series.indexOf(main)][index], step = main.x[index], active = scale();
      tip.replaceChildren();
      const at = axis === "step" ? "step " + step.toLocaleString("en") : AXES[axis].write(valueAt(main.run, step)) + ", step " + step.toLocaleString("en");
      element("b", "", tip).textContent = at;
      data.series.forEach((series, number) => {
        const i = series.x.length ? nearest(places[number], own) : -1;
        const value = i < 0 ? null : series.y[i];
        dots[number].hidden = value === null;
        if (i < 0) return;
        const line = element("span", "key line c" + series.colour, tip);
        const where = series.x[i] === step || axis !== "step" ? "" : " (step " + series.x[i].toLocaleString("en") + ")";
        line.textContent = series.name + " " + (value === null ? "-" : round(value)) + where;
        if (value === null) return;
        dots[number].style.left = 100 * places[number][i] + "%";
        dots[number].style.top = 100 * (1 - height(active, value)) + "%";
      });
      rule.style.left = 100 * own + "%";
      // Beside the rule, on its roomier side, but never out of the plot.
      const room = frame.clientWidth, width = tip.offsetWidth;
      const beside = own < 0.5 ? own * room + 12 : own * room - 12 - width;
      tip.style.left = Math.max(0, Math.min(beside, room - width)) + "px";
      frame.classList.add("hover");
    };
    const hide = () => frame.classList.remove("hover");

    frame.addEventListener("pointermove", (event) => {
      const box = frame.getBoundingClientRect();
      show(nearest(places[data.series.indexOf(main)], (event.clientX - box.left) / box.width));
    });
    frame.addEventListener("pointerleave", hide);
    frame.addEventListener("blur", hide);
    frame.addEventListener("keydown", (event) => {
      const last = main.x.length - 1, from = here === null ? -1 : here;
      const to = { ArrowLeft: here === null ? last : from - 1, ArrowRight: from + 1, Home: 0, End: last }[event.key];
      if (event.key === "Escape") hide();
      if (to === undefined) return;
      event.preventDefault();
      show(Math.min(last, Math.max(0, to)));
    });
    const button = figure.querySelector(".csv");
    button.hidden = false;
    button.setAttribute("aria-label", "Download " + figure.dataset.title + " as CSV");
    button.addEventListener("click", () => window.meshwrightSave(figure.dataset.chart + ".csv", "text/csv", csv(data)));
    lay();
    return lay;
  };

  const figures = [...document.querySelectorAll("figure[data-chart]")], lays = figures.map(attach);
  const choice = document.querySelector(".axis.switch");
  if (choice) {
    const has = (name) => runs.length > 0 && runs.every((run) => run[name]);
    choice.querySelectorAll("input").forEach((input) => {
      input.checked = input.value === axis;
      if (input.value !== "step" && !has(input.value)) input.parentElement.remove();
      input.addEventListener("change", () => { axis = input.value; lays.forEach((lay) => lay()); });
    });
    choice.hidden = choice.querySelectorAll("input").length < 2;
  }
  document.documentElement.dataset.ready = "true";
  document.documentElement.dataset.charts = String(figures.length);
})();

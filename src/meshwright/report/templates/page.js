"use strict";
// The hover read-out of the charts: the nearest recorded step, its values, and where they lie.
(() => {
  const round = (v) =>
    Math.abs(v) >= 10000 ? Math.round(v).toLocaleString("en")
      : Math.abs(v) < 0.001 && v !== 0 ? v.toExponential(3) : String(Number(v.toPrecision(5)));

  // The index of the recorded value that is nearest in x; xs ascend.
  const nearest = (series, x) => {
    let low = 0, high = series.x.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (series.x[middle] < x) low = middle + 1; else high = middle;
    }
    return low > 0 && x - series.x[low - 1] <= series.x[low] - x ? low - 1 : low;
  };

  const element = (kind, css, parent) => {
    const made = document.createElement(kind);
    made.className = css;
    parent.append(made);
    return made;
  };

  const attach = (figure) => {
    const data = JSON.parse(figure.querySelector("script").textContent);
    const frame = figure.querySelector(".frame");
    const [left, right] = data.x;
    const rule = element("div", "rule", frame);
    const tip = element("div", "tip", frame);
    const dots = data.series.map((s) => element("i", "dot c" + s.colour, frame));
    const at = (x) => (x - left) / (right - left);
    const scale = () => {
      const log = figure.querySelector(".pick-log");
      return data.scales[log && log.checked ? "log" : "linear"];
    };
    const height = (s, v) =>
      s.log ? Math.log(v / s.low) / Math.log(s.high / s.low) : (v - s.low) / (s.high - s.low);
    let step = null;

    const show = (x) => {
      const main = data.series.find((s) => s.x.length);
      step = main.x[nearest(main, x)];
      const active = scale();
      tip.replaceChildren();
      element("b", "", tip).textContent = "step " + step.toLocaleString("en");
      data.series.forEach((series, index) => {
        const i = series.x.length ? nearest(series, step) : -1;
        const value = i < 0 ? null : series.y[i];
        dots[index].hidden = value === null;
        if (i < 0) return;
        const line = element("span", "key line c" + series.colour, tip);
        const where = series.x[i] === step ? "" : " (step " + series.x[i].toLocaleString("en") + ")";
        line.textContent = series.name + " " + (value === null ? "-" : round(value)) + where;
        if (value === null) return;
        dots[index].style.left = 100 * at(series.x[i]) + "%";
        dots[index].style.top = 100 * (1 - height(active, value)) + "%";
      });
      const share = at(step);
      rule.style.left = 100 * share + "%";
      // Beside the rule, on its roomier side, but never out of the plot.
      const room = frame.clientWidth, width = tip.offsetWidth;
      const beside = share < 0.5 ? share * room + 12 : share * room - 12 - width;
      tip.style.left = Math.max(0, Math.min(beside, room - width)) + "px";
      frame.classList.add("hover");
    };
    const hide = () => frame.classList.remove("hover");

    frame.addEventListener("pointermove", (event) => {
      const box = frame.getBoundingClientRect();
      const share = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
      show(left + share * (right - left));
    });
    frame.addEventListener("pointerleave", hide);
    frame.addEventListener("blur", hide);
    frame.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!move) return;
      event.preventDefault();
      const main = data.series.find((s) => s.x.length);
      const here = step === null ? (move > 0 ? -1 : main.x.length) : nearest(main, step);
      show(main.x[Math.min(main.x.length - 1, Math.max(0, here + move))]);
    });
  };

  const figures = document.querySelectorAll("figure[data-chart]");
  figures.forEach(attach);
  document.documentElement.dataset.ready = "true";
  document.documentElement.dataset.charts = String(figures.length);
})();

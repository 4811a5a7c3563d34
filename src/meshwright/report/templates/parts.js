"use strict";
// Parts of all pages: what bars and points stand for, under the pointer and by keyboard, and data to download.
(() => {
  const element = (kind, css, parent, words = "") => {
    const made = document.createElement(kind);
    made.className = css;
    made.textContent = words;
    parent.append(made);
    return made;
  };
  const tipIn = (parent) => {
    const tip = element("div", "tip", parent);
    tip.setAttribute("role", "status");
    return tip;
  };
  // Beside a point of the parent, and never out of it sideways.
  const put = (tip, x, y, room) => {
    tip.classList.add("shown");
    tip.style.left = Math.max(0, Math.min(x + 12, room - tip.offsetWidth)) + "px";
    tip.style.top = y + "px";
  };
  // Up, down, left and right choose one of several; the parts of the chosen one are told.
  const chosenByKeys = (box, items, tell, hide) => {
    let at = -1;
    const go = (to) => {
      if (at >= 0) items[at].classList.remove("here");
      at = Math.max(0, Math.min(items.length - 1, to));
      items[at].classList.add("here");
      tell(items[at]);
    };
    box.addEventListener("focus", () => { if (box.matches(":focus-visible")) go(Math.max(0, at)); });
    box.addEventListener("blur", () => { if (at >= 0) items[at].classList.remove("here"); hide(); });
    box.addEventListener("keydown", (event) => {
      const to = { ArrowUp: at - 1, ArrowLeft: at - 1, ArrowDown: at + 1, ArrowRight: at + 1, Home: 0, End: items.length - 1 }[event.key];
      if (event.key === "Escape") hide();
      if (to === undefined) return;
      event.preventDefault();
      go(to);
    });
  };

  // Rows of bars, and a stack, whose pieces have their words in a title.
  document.querySelectorAll(".bars, .stack").forEach((box) => {
    const rows = box.matches(".stack") ? [box] : [...box.querySelectorAll(".row")];
    if (!rows.length) return;
    const holder = box.matches(".stack") ? box.parentElement : box, tip = tipIn(holder);
    const heading = (row) => (row.querySelector(".name") || { textContent: "" }).textContent;
    rows.forEach((row) => {
      const pieces = [...row.querySelectorAll("i[title]")];
      pieces.forEach((piece) => { piece.dataset.words = piece.title; piece.removeAttribute("title"); });
      const words = pieces.map((piece) => piece.dataset.words);
      row.setAttribute("role", "img");
      row.setAttribute("aria-label", [heading(row), ...words].filter(Boolean).join("; "));
    });
    box.tabIndex = 0;
    box.setAttribute("role", "group");
    if (!box.hasAttribute("aria-label")) box.setAttribute("aria-label", "Bars; arrow keys go from one to the next");
    if (box.matches(".stack")) box.setAttribute("aria-label", rows[0].getAttribute("aria-label"));
    const tell = (row, only) => {
      tip.replaceChildren();
      if (heading(row)) element("b", "", tip, heading(row));
      for (const piece of row.querySelectorAll("i[data-words]")) {
        if (!only || only === piece) element("span", "key " + piece.className, tip, piece.dataset.words);
      }
      const inner = holder.getBoundingClientRect(), track = (row.querySelector(".track") || row).getBoundingClientRect();
      const x = only ? only.getBoundingClientRect().left + only.getBoundingClientRect().width / 2 : track.left;
      put(tip, x - inner.left, track.bottom - inner.top + 6, inner.width);
    };
    const hide = () => tip.classList.remove("shown");
    rows.forEach((row) => row.addEventListener("pointermove", (event) => {
      const piece = event.target.closest("i[data-words]");
      if (piece) tell(row, piece); else hide();
    }));
    holder.addEventListener("pointerleave", hide);
    chosenByKeys(box, rows, (row) => tell(row), hide);
  });

  // Points of a plot, each with its words in a <title>, in the order of x.
  document.querySelectorAll("[data-plot]").forEach((figure) => {
    const frame = figure.querySelector(".frame"), tip = tipIn(frame), words = new Map();
    figure.querySelectorAll("path > title").forEach((title) => {
      words.set(title.parentElement, title.textContent);
      title.remove();
    });
    const x = (path) => Number(path.getAttribute("d").slice(1).split(" ")[0]);
    const points = [...words.keys()].sort((a, b) => x(a) - x(b));
    const tell = (path) => {
      tip.replaceChildren();
      element("span", "key points " + path.getAttribute("class").replace(" here", ""), tip, words.get(path));
      const [left, top] = path.getAttribute("d").slice(1).split(/[ h]/).map(Number);
      const box = frame.getBoundingClientRect(), place = (left / 1000) * box.width;
      put(tip, place > box.width / 2 ? place - tip.offsetWidth - 24 : place, (top / 300) * box.height + 10, box.width);
    };
    const hide = () => tip.classList.remove("shown");
    // The nearest point within some pixels of the pointer.
    frame.addEventListener("pointermove", (event) => {
      const box = frame.getBoundingClientRect();
      const far = (path) => {
        const [left, top] = path.getAttribute("d").slice(1).split(/[ h]/).map(Number);
        return Math.hypot(box.left + (left / 1000) * box.width - event.clientX, box.top + (top / 300) * box.height - event.clientY);
      };
      const best = points.map((path) => [far(path), path]).sort((a, b) => a[0] - b[0])[0];
      if (best && best[0] < 14) tell(best[1]); else hide();
    });
    frame.addEventListener("pointerleave", hide);
    if (points.length) chosenByKeys(frame, points, tell, hide);
  });

  // Files of what the page holds, made here: nothing is fetched.
  window.meshwrightSave = (name, type, content) => {
    const link = document.createElement("a");
    const place = URL.createObjectURL(new Blob([content], { type }));
    link.setAttribute("href", place);
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(place), 10000);
  };
  document.querySelectorAll("button[data-save]").forEach((button) => {
    button.hidden = false;
    button.addEventListener("click", () => {
      const held = document.getElementById(button.dataset.save);
      window.meshwrightSave(button.dataset.name, "application/json", held.textContent);
    });
  });
})();

// One interactive chart. Colours come from CSS classes, so a theme change needs no redrawing.
// Hidden series and zoom survive an update with new numbers.

const NARROW = 520; // pixels; narrower charts have no space for a tooltip next to the cursor
const MOST_RANGES = 8; // in a tooltip; with more series it shows only their values

function html(name, properties, ...children) {
  const node = Object.assign(document.createElement(name), properties);
  node.append(...children);
  return node;
}

class Chart {
  constructor(figure) {
    this.figure = figure;
    this.frame = figure.querySelector(".plot");
    this.hidden = new Set();
    this.range = null; // of x, when zoomed
    this.stop = null; // position of the cursor
    this.legend = html("div", { className: "legend", role: "group" });
    this.legend.setAttribute("aria-label", "Series; click to hide or show, double-click to show one alone");
    this.tip = html("div", { className: "tip", hidden: true });
    this.frame.after(this.legend);
    figure.querySelector("figcaption").append(this.makeTools());
    this.update(JSON.parse(figure.querySelector("script").textContent));
    this.listen();
    new ResizeObserver(() => this.frame.clientWidth !== this.plot?.width && this.draw()).observe(this.frame);
  }

  update(spec) {
    this.isLog ??= spec.y.log;
    this.isFocused ??= true;
    this.spec = spec;
    this.endButton.hidden = spec.points || spec.diagonal;
    this.drawLegend();
    this.draw();
  }

  draw() {
    const width = this.frame.clientWidth;
    if (!width) return; // folded away; the observer calls again when it opens
    this.plot = new Plot(this.spec, this.shown, this.range ?? wholeRange(this.spec), this.isLog, this.isFocused, width);
    this.frame.replaceChildren(this.plot.node, this.tip);
    this.frame.dataset.drawn = this.shown.length;
    this.logButton.setAttribute("aria-pressed", String(this.isLog));
    this.focusButton.setAttribute("aria-pressed", String(this.isFocused));
    this.focusButton.hidden = !this.plot.canFocus;
    this.allButton.disabled = this.range === null;
    this.moveTo(null);
  }

  get shown() {
    return this.spec.series.filter((series) => !this.hidden.has(series.name));
  }

  // Legend

  drawLegend() {
    const focused = [...this.legend.children].indexOf(document.activeElement);
    this.legend.replaceChildren(...this.spec.series.map((series) => {
      const button = html("button", { type: "button", title: series.name }, this.swatch(series), html("span", { textContent: series.name }));
      button.setAttribute("aria-pressed", String(!this.hidden.has(series.name)));
      button.onclick = () => this.toggle(series.name);
      button.ondblclick = () => this.isolate(series.name);
      button.onpointerenter = button.onfocus = () => this.highlight(series.name);
      button.onpointerleave = button.onblur = () => this.highlight(null);
      return button;
    }));
    if (focused >= 0) this.legend.children[focused]?.focus();
  }

  swatch(series) {
    const sample = this.spec.points ? mark(markOf(series), [11, 5], "") : svg("path", { class: `d${dashOf(series)}`, d: "M0,5H22" });
    return svg("svg", { class: `swatch c${colourOf(series)}`, viewBox: "0 0 22 10", "aria-hidden": "true" }, sample);
  }

  toggle(name) {
    if (!this.hidden.delete(name)) this.hidden.add(name);
    this.drawLegend();
    this.draw();
  }

  isolate(name) {
    const others = this.spec.series.map((series) => series.name).filter((other) => other !== name);
    const alone = others.every((other) => this.hidden.has(other));
    this.hidden = new Set(alone ? [] : others);
    this.drawLegend();
    this.draw();
  }

  /** Shows the band of a series, and dims the others if this is what the pointer is for. */
  highlight(name, dims = true) {
    for (const node of this.frame.querySelectorAll("[data-series]")) {
      node.classList.toggle("dim", dims && name !== null && node.dataset.series !== name);
      node.classList.toggle("lit", this.shown.length === 1 || node.dataset.series === name);
    }
  }

  // Buttons and zoom

  makeTools() {
    const about = this.figure.querySelector("h3").textContent;
    const button = (text, label, action) => {
      const made = html("button", { type: "button", textContent: text, title: label, onclick: action });
      made.setAttribute("aria-label", `${label}: ${about}`);
      return made;
    };
    this.endButton = button("end", "Show the last third", () => this.showEnd());
    this.allButton = button("all", "Show all", () => this.zoomTo(null));
    this.focusButton = button("focus", "Leave out the range of the first epochs", () => { this.isFocused = !this.isFocused; this.draw(); });
    this.logButton = button("log", "Logarithmic scale", () => { this.isLog = !this.isLog; this.draw(); });
    return html("div", { className: "tools" },
      button("+", "Zoom in", () => this.zoomBy(0.5)),
      button("−", "Zoom out", () => this.zoomBy(2)),
      this.endButton, this.allButton, this.focusButton, this.logButton,
      button("CSV", "Save the numbers", () => this.save()));
  }

  zoomTo(range) {
    const [low, high] = wholeRange(this.spec);
    const clipped = range && [Math.max(low, range[0]), Math.min(high, range[1])];
    const isPart = clipped && clipped[1] > clipped[0] && clipped[1] - clipped[0] < (high - low) * 0.999;
    this.range = isPart ? clipped : null;
    this.draw();
  }

  zoomBy(factor) {
    const [least, most] = wholeRange(this.spec);
    const [low, high] = this.range ?? [least, most];
    const middle = this.stop?.x ?? (low + high) / 2;
    const half = ((high - low) * factor) / 2;
    if (half * 2 > (most - least) / 500) this.zoomTo([middle - half, middle + half]);
  }

  showEnd() {
    const [low, high] = wholeRange(this.spec);
    this.zoomTo([low + (high - low) * (2 / 3), high]);
  }

  save() {
    const link = html("a", { href: URL.createObjectURL(new Blob([csvOf(this.spec)], { type: "text/csv" })) });
    link.download = `${this.spec.id}.csv`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  // Reading values, by pointer and by keyboard

  moveTo(stop) {
    this.stop = stop;
    this.tip.hidden = stop === null;
    if (stop === null) {
      this.plot.overlay.replaceChildren();
      return;
    }
    this.plot.showCursor(stop);
    this.fillTip(stop);
    const x = this.plot.x(stop.x);
    const isNarrow = this.plot.width < NARROW;
    this.tip.classList.toggle("below", isNarrow);
    const left = !isNarrow && x < this.plot.width / 2 ? `${x + 14}px` : "";
    const right = !isNarrow && !left ? `${this.plot.width - x + 14}px` : "";
    Object.assign(this.tip.style, { left, right });
  }

  place(stop) {
    const { title, unit, labels } = this.spec.x;
    return labels.length ? labels[stop.x] : `${title} ${tickWords(stop.x)}${unit ? ` ${unit}` : ""}`;
  }

  fillTip(stop) {
    const lines = [...stop.items].sort((a, b) => b.series.y[b.index] - a.series.y[a.index]).map(({ series, index }) => {
      const value = html("span", { className: "value" }, html("b", { textContent: inWords(series.y[index]) }));
      if (stop.items.length <= MOST_RANGES && series.low.length && series.low[index] < series.high[index]) {
        const n = series.n.length ? `, n ${series.n[index]}` : "";
        const range = ` ${inWords(series.low[index])} … ${inWords(series.high[index])}${n}`;
        value.append(html("span", { className: "range", textContent: range }));
      }
      return html("div", {}, this.swatch(series), html("span", { className: "name", textContent: series.name }), value);
    });
    this.tip.replaceChildren(html("b", { textContent: this.place(stop) }), ...lines);
  }

  announce(stop) {
    const unit = this.spec.y.unit ? ` ${this.spec.y.unit}` : "";
    const values = stop.items.map(({ series, index }) => `${series.name} ${inWords(series.y[index])}${unit}`);
    document.getElementById("announce").textContent = `${this.place(stop)}: ${values.join(", ")}`;
  }

  listen() {
    let from = null; // start of a mouse selection
    const place = (event) => {
      const box = this.frame.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    const on = (name, action) => this.frame.addEventListener(name, action);
    on("pointerdown", (event) => { if (event.pointerType === "mouse" && event.button === 0) [from] = place(event); });
    on("pointermove", (event) => {
      const [px, py] = place(event);
      this.moveTo(from === null ? this.plot.nearest(px, py) : null);
      this.highlight(this.plot.pointedAt(this.stop, py), false);
      if (from !== null) this.plot.showSelection(from, px);
    });
    window.addEventListener("pointerup", (event) => {
      if (from === null) return;
      const [start, end] = [from, place(event)[0]].sort((a, b) => a - b);
      from = null;
      if (end - start > 8) this.zoomTo([this.plot.valueAt(start), this.plot.valueAt(end)]);
      else this.moveTo(null);
    });
    on("pointerleave", () => { if (from === null) this.moveTo(null); this.highlight(null); });
    on("dblclick", () => this.zoomTo(null));
    on("blur", () => this.moveTo(null));
    on("keydown", (event) => this.onKey(event));
  }

  onKey(event) {
    const stops = this.plot.stops();
    const last = stops.length - 1;
    const now = stops.findIndex((stop) => stop.key === this.stop?.key);
    const step = event.shiftKey ? 10 : 1;
    const to = { ArrowRight: now + step, ArrowLeft: now < 0 ? last : now - step, Home: 0, End: last }[event.key];
    const action = {
      "+": () => this.zoomBy(0.5), "=": () => this.zoomBy(0.5), "-": () => this.zoomBy(2), 0: () => this.zoomTo(null), Escape: () => this.moveTo(null),
    }[event.key];
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (to !== undefined && stops.length) {
      this.moveTo(stops[Math.max(0, Math.min(last, to))]);
      this.announce(this.stop);
    } else if (action) action();
    else return;
    event.preventDefault();
  }
}

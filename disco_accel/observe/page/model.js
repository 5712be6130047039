"use strict";
// The step as typed columns, the view that all drawings share, and texts for people. Times are nanoseconds.

const page = {};

page.model = JSON.parse(document.getElementById("model").textContent);

(() => {
  const model = page.model;
  const columns = (table) => {
    const found = {};
    for (const key of Object.keys(table)) found[key] = Float64Array.from(table[key]);
    return found;
  };
  page.events = columns(model.events);
  page.stays = columns(model.stays);
  page.text = (number) => model.texts[number];
  page.valueName = (number) => model.texts[model.values[number]];
  page.finish = Math.max(model.finish, 1);

  // By vertex id: its place among the events.
  page.placeOf = new Map();
  (page.events.id || []).forEach((id, place) => page.placeOf.set(id, place));

  // Events of a lane lie side by side, in the order of their starts.
  page.lanes = model.lanes.map((lane, number) => ({ ...lane, number, from: 0, to: 0, gaps: [] }));
  const lane = page.events.lane || [];
  for (let k = 0; k < lane.length; k++) {
    const found = page.lanes[lane[k]];
    if (!found.to) found.from = k;
    found.to = k + 1;
  }
  const gaps = model.gaps;
  page.gaps = gaps.lane.map((number, k) => ({
    lane: number, start: gaps.start[k], end: gaps.end[k], cause: gaps.cause[k], then: gaps.then[k], for: gaps.for[k],
    what: page.text(gaps.what[k]),
  }));
  for (const gap of page.gaps) page.lanes[gap.lane].gaps.push(gap);

  page.causes = {
    data: "waits for data", memory: "waits for room", gate: "waits for the caller's backward", start: "could have started",
    done: "nothing left to run",
  };
  page.causeColors = { data: "--data", memory: "--memory", gate: "--caller", start: "--start", done: "--done" };
  page.groupColors = ["--matmul", "--attention", "--other", "--reload", "--offload", "--between"];
  page.classColors = ["--resident", "--streamed", "--activations", "--scratch", "--kept"];

  // The first event of a lane that ends behind `time`.
  page.firstBehind = (found, time) => {
    let low = found.from;
    let high = found.to;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (page.events.end[middle] > time) high = middle;
      else low = middle + 1;
    }
    return low;
  };

  // The event of a lane at `time`, or the nearest one within `reach`; -1: none.
  page.eventAt = (found, time, reach) => {
    const k = page.firstBehind(found, time);
    let best = -1;
    let distance = reach;
    for (const other of [k - 1, k, k + 1]) {
      if (other < found.from || other >= found.to) continue;
      const away = Math.max(page.events.start[other] - time, time - page.events.end[other], 0);
      if (away <= distance && (best < 0 || away < distance)) {
        best = other;
        distance = away;
      }
    }
    return best;
  };
  page.gapAt = (found, time) => found.gaps.find((gap) => gap.start <= time && time < gap.end);

  const three = (number) => (number >= 100 ? number.toFixed(0) : number >= 10 ? number.toFixed(1) : number.toFixed(2));
  page.seconds = (nanoseconds) => {
    const sign = nanoseconds < 0 ? "−" : "";
    const size = Math.abs(nanoseconds);
    if (size >= 1e9) return `${sign}${(size / 1e9).toFixed(size >= 1e11 ? 1 : 3)} s`;
    if (size >= 1e6) return `${sign}${three(size / 1e6)} ms`;
    if (size >= 1e3) return `${sign}${three(size / 1e3)} µs`;
    return `${sign}${size.toFixed(0)} ns`;
  };
  // A time in the step, fine enough to tell neighbours apart.
  page.moment = (nanoseconds) => {
    const [scale, unit] = page.tickUnit(page.finish);
    const digits = Math.ceil(Math.log10(scale / (page.view.to - page.view.from))) + 4;
    return `${(nanoseconds / scale).toFixed(Math.min(6, Math.max(0, digits)))} ${unit}`;
  };
  page.bytes = (bytes) => {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let unit = 0;
    let size = Math.abs(bytes);
    while (size >= 1024 && unit < units.length - 1) {
      size /= 1024;
      unit += 1;
    }
    // As the package writes sizes: exact where it is a whole number of units.
    return `${bytes < 0 ? "−" : ""}${Number.isInteger(size) ? size : size.toFixed(2)}${units[unit]}`;
  };
  page.share = (part, whole) => {
    const share = whole ? (100 * part) / whole : 0;
    return share === 0 || share >= 10 ? `${share.toFixed(0)} %` : `${share.toFixed(1)} %`;
  };
  page.tickUnit = (range) => (range >= 2e9 ? [1e9, "s"] : range >= 2e6 ? [1e6, "ms"] : range >= 2e3 ? [1e3, "µs"] : [1, "ns"]);

  // Ticks at round numbers of the unit that fits.
  page.ticks = (from, to, most) => {
    const [scale, unit] = page.tickUnit(to - from);
    const raw = (to - from) / scale / most;
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].find((each) => each * power >= raw) * power;
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    const found = [];
    for (let k = Math.ceil(from / scale / step); k * step * scale <= to; k++) {
      found.push([k * step * scale, `${(k * step).toFixed(digits)} ${unit}`]);
    }
    return found;
  };

  // One node of the page with its text, attributes and children; text is never read as HTML.
  page.node = (tag, attributes = {}, ...children) => {
    const made = document.createElement(tag);
    for (const [key, content] of Object.entries(attributes)) {
      if (key === "class") made.className = content;
      else if (key.startsWith("on")) made.addEventListener(key.slice(2), content);
      else made.setAttribute(key, content);
    }
    made.append(...children.map((child) => (child instanceof Node ? child : String(child))));
    return made;
  };
  // A name that may be broken behind its dots.
  page.name = (text) => {
    const made = document.createDocumentFragment();
    text.split(/(?<=[.])(?=[A-Za-z_*])/).forEach((part, number) => made.append(...(number ? [document.createElement("wbr")] : []), part));
    return made;
  };
  page.swatch = (color) => {
    const made = page.node("i");
    made.style.background = `var(${color})`;
    return made;
  };
  page.color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  page.byId = (id) => document.getElementById(id);

  // What is shown: from `from` to `to`; `at` is the time under the pointer, held where `held`.
  const least = 50;
  page.view = {
    from: 0, to: page.finish, at: null, held: false, lane: 0, event: -1, listeners: [],
    onChange(listener) { this.listeners.push(listener); },
    set(from, to) {
      const width = Math.min(Math.max(to - from, Math.min(least, page.finish)), page.finish);
      const start = Math.min(Math.max(from, 0), page.finish - width);
      this.from = start;
      this.to = start + width;
      this.changed("range");
    },
    zoom(factor, around = (this.from + this.to) / 2) {
      this.set(around - (around - this.from) * factor, around + (this.to - around) * factor);
    },
    pan(share) {
      const by = (this.to - this.from) * share;
      this.set(this.from + by, this.to + by);
    },
    point(time, hold = false) {
      if (this.held && !hold && time !== null) return;
      this.at = time;
      this.held = hold && time !== null;
      this.changed("point");
    },
    show(start, end) {
      const margin = Math.max((end - start) * 1.5, page.finish / 2000, 100);
      this.set(start - margin, end + margin);
      this.point((start + end) / 2, true);
    },
    select(place) {
      this.event = place;
      if (place < 0) return this.point(null, true);
      const start = page.events.start[place];
      const end = page.events.end[place];
      this.lane = page.events.lane[place];
      const width = this.to - this.from;
      if (start < this.from || end > this.to) this.set(start - width / 2, start + width / 2);
      this.point((start + end) / 2, true);
      return undefined;
    },
    changed(what) {
      this.pending = { ...this.pending, [what]: true };
      if (this.waiting) return;
      this.waiting = true;
      requestAnimationFrame(() => {
        const pending = this.pending;
        this.waiting = false;
        this.pending = {};
        for (const listener of this.listeners) listener(pending);
      });
    },
  };
})();

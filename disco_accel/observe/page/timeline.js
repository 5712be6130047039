"use strict";
// Kernels and copies by lane, the strip of phases above them, and the overview of the whole step.

page.GUTTER = 132;
page.RIGHT = 14;

(() => {
  const { view, events, lanes } = page;
  const canvas = page.byId("timeline");
  const overview = page.byId("overview");
  const tip = page.byId("tip");
  const TOP = 40;
  const ROW = 34;
  const GAP = 8;
  let matches = null;

  const height = TOP + lanes.length * (ROW + GAP) + 4;
  const width = (element) => element.clientWidth - page.GUTTER - page.RIGHT;
  const x = (time) => page.GUTTER + ((time - view.from) / (view.to - view.from)) * width(canvas);
  const timeAt = (px) => view.from + ((px - page.GUTTER) / width(canvas)) * (view.to - view.from);
  const rowTop = (lane) => TOP + lane * (ROW + GAP);
  const laneAt = (y) => lanes[Math.floor((y - TOP + GAP / 2) / (ROW + GAP))];

  const prepared = (element, tall) => {
    const scale = window.devicePixelRatio || 1;
    const wide = element.clientWidth;
    if (element.width !== Math.round(wide * scale) || element.height !== Math.round(tall * scale)) {
      element.width = Math.round(wide * scale);
      element.height = Math.round(tall * scale);
      element.style.height = `${tall}px`;
    }
    const context = element.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, wide, tall);
    context.font = "12px system-ui, 'Segoe UI', Roboto, sans-serif";
    context.textBaseline = "middle";
    return context;
  };

  // Bars of a lane from `top` on. Events below a pixel are summed by column: its colour is that of the work that takes
  // most of it, as opaque as the share of the column in which anything runs.
  const bars = (context, lane, from, to, left, wide, top, tall, colors) => {
    const scale = wide / (to - from);
    const columns = new Map();
    for (let k = page.firstBehind(lane, from); k < lane.to && events.start[k] < to; k++) {
      const start = Math.max(events.start[k], from);
      const end = Math.min(events.end[k], to);
      const a = left + (start - from) * scale;
      const size = (end - start) * scale;
      if (size >= 1.5) {
        const dim = matches && !matches.has(k);
        context.globalAlpha = dim ? 0.15 : 1;
        context.fillStyle = colors[events.group[k]];
        context.fillRect(a, top, size - (size > 4 ? 1 : 0), tall);
        if (events.again[k] >= 0 && tall > 20) {
          context.fillStyle = colors.again;
          context.fillRect(a, top + tall - 4, size - (size > 4 ? 1 : 0), 2);
        }
        if (size > 60 && tall > 20) label(context, page.text(events.name[k]), a + 5, top + tall / 2, size - 10);
        continue;
      }
      const column = Math.floor(a);
      let sums = columns.get(column);
      if (!sums) columns.set(column, (sums = new Float64Array(8)));
      sums[events.group[k]] += size;
      sums[6] += size;
      if (!matches || matches.has(k)) sums[7] += size;
    }
    for (const [column, sums] of columns) {
      let most = 0;
      for (let group = 1; group < 6; group++) if (sums[group] > sums[most]) most = group;
      context.globalAlpha = (matches && !sums[7] ? 0.2 : 1) * Math.min(1, Math.max(0.25, sums[6]));
      context.fillStyle = colors[most];
      context.fillRect(column, top, 1, tall);
    }
    context.globalAlpha = 1;
  };

  const label = (context, text, left, middle, most) => {
    let shown = text;
    const fits = Math.floor(most / 6);
    if (shown.length > fits) shown = fits > 6 ? `…${shown.slice(-(fits - 1))}` : shown.slice(0, fits);
    context.save();
    context.beginPath();
    context.rect(left, middle - 10, most, 20);
    context.clip();
    context.fillStyle = "#fff";
    context.shadowColor = "rgb(0 0 0 / 75%)";
    context.shadowBlur = 3;
    context.fillText(shown, left, middle);
    context.restore();
  };

  const palette = () => {
    const colors = page.groupColors.map(page.color);
    colors.again = page.color("--again");
    return colors;
  };

  const draw = () => {
    const context = prepared(canvas, height);
    const wide = width(canvas);
    const colors = palette();
    const [ink, muted, line, soft] = ["--ink", "--muted", "--line", "--soft"].map(page.color);
    context.fillStyle = muted;
    context.strokeStyle = line;
    context.textAlign = "center";
    for (const [time, text] of page.ticks(view.from, view.to, Math.max(2, wide / 110))) {
      context.fillStyle = line;
      context.fillRect(Math.round(x(time)), 14, 1, height);
      context.fillStyle = muted;
      const half = context.measureText(text).width / 2;
      context.fillText(text, Math.min(Math.max(x(time), page.GUTTER + half), page.GUTTER + wide - half), 7);
    }
    context.textAlign = "left";
    phases(context, wide, ink, muted);
    for (const lane of lanes) {
      const top = rowTop(lane.number);
      context.fillStyle = soft;
      context.fillRect(page.GUTTER, top, wide, ROW);
      if (lane.number === view.lane && document.activeElement === canvas) {
        context.fillStyle = page.color("--focus");
        context.fillRect(0, top, 3, ROW);
      }
      context.fillStyle = ink;
      context.fillText(lane.label, 8, top + 10);
      context.fillStyle = muted;
      context.fillText(`${page.share(lane.busy, page.finish)} busy`, 8, top + 25);
      bars(context, lane, view.from, view.to, page.GUTTER, wide, top, ROW, colors);
    }
    gate(context, height);
    chosen(context, ink);
  };

  const phases = (context, wide, ink, muted) => {
    page.model.phases.forEach((phase, number) => {
      const a = Math.max(x(phase.start), page.GUTTER);
      const b = Math.min(x(phase.end), page.GUTTER + wide);
      if (b <= a) return;
      context.globalAlpha = 0.28 - 0.08 * number;
      context.fillStyle = muted;
      context.fillRect(a, 19 + 2 * number, b - a, 15 - 2 * number);
      context.globalAlpha = 1;
      context.fillStyle = ink;
      if (b - a > 60) context.fillText(phase.name, a + 6, 27);
    });
  };

  const gate = (context, tall) => {
    if (page.model.gate === null) return;
    const at = x(page.model.gate);
    if (at < page.GUTTER || at > page.GUTTER + width(canvas)) return;
    context.strokeStyle = page.color("--gate");
    context.setLineDash([2, 3]);
    context.beginPath();
    context.moveTo(at, 16);
    context.lineTo(at, tall);
    context.stroke();
    context.setLineDash([]);
  };

  const chosen = (context, ink) => {
    if (view.event >= 0) {
      const a = Math.max(x(events.start[view.event]), page.GUTTER);
      const size = Math.min(Math.max(x(events.end[view.event]) - a, 3), page.GUTTER + width(canvas) - a);
      context.strokeStyle = ink;
      context.lineWidth = 2;
      if (size > 0) context.strokeRect(a, rowTop(events.lane[view.event]) - 1, size, ROW + 2);
      context.lineWidth = 1;
    }
    if (view.at === null) return;
    const at = x(view.at);
    if (at < page.GUTTER) return;
    context.strokeStyle = ink;
    context.setLineDash(view.held ? [] : [4, 3]);
    context.beginPath();
    context.moveTo(at, 14);
    context.lineTo(at, height);
    context.stroke();
    context.setLineDash([]);
  };

  const drawOverview = () => {
    const context = prepared(overview, 30);
    const wide = width(overview);
    const colors = palette();
    const tall = Math.max(3, Math.floor(26 / Math.max(lanes.length, 1)) - 1);
    const kept = matches;
    lanes.forEach((lane, number) => {
      bars(context, lane, 0, page.finish, page.GUTTER, wide, 2 + number * (tall + 1), tall, colors);
    });
    matches = kept;
    context.fillStyle = page.color("--muted");
    context.fillText("all of the step", 8, 15);
    const a = page.GUTTER + (view.from / page.finish) * wide;
    const b = page.GUTTER + (view.to / page.finish) * wide;
    context.globalAlpha = 0.65;
    context.fillStyle = page.color("--panel");
    context.fillRect(page.GUTTER, 0, a - page.GUTTER, 30);
    context.fillRect(b, 0, page.GUTTER + wide - b, 30);
    context.globalAlpha = 1;
    context.strokeStyle = page.color("--focus");
    context.strokeRect(a + 0.5, 0.5, Math.max(b - a - 1, 2), 29);
  };

  const line = (name, ...content) => page.node("div", {}, page.node("span", { class: "muted" }, `${name} `), ...content);

  page.eventLines = (k) => {
    const lane = lanes[events.lane[k]];
    const seconds = events.end[k] - events.start[k];
    const lines = [page.node("b", {}, page.text(events.name[k]))];
    if (events.module[k] !== undefined && page.text(events.module[k])) lines.push(line("module", page.text(events.module[k])));
    lines.push(line("runs", `${page.seconds(seconds)} from ${page.moment(events.start[k])} on`));
    if (events.bytes[k]) lines.push(line("bytes", `${page.bytes(events.bytes[k])}, ${page.bytes(events.bytes[k] / (seconds / 1e9 || 1))}/s`));
    lines.push(line("phase", ["forward", "backward", "update"][events.phase[k]]));
    if (events.fused[k]) lines.push(line("fused", `computes ${events.fused[k]} calls`));
    if (events.again[k] >= 0) lines.push(line("computed again", `repeats kernel ${events.again[k]}`));
    for (const gap of lane.gaps.filter((each) => each.then === events.id[k])) {
      lines.push(line("before it", `${page.seconds(gap.end - gap.start)} idle: ${page.causes[gap.cause]}${gap.what ? `: ${gap.what}` : ""}`));
    }
    lines.push(line("vertex", `${events.id[k]}, ${page.model.groups[events.group[k]]}`));
    return lines;
  };

  const gapLines = (gap) => [
    page.node("b", {}, `idle for ${page.seconds(gap.end - gap.start)}`),
    line("why", page.causes[gap.cause]),
    ...(gap.what ? [line("waits for", gap.what)] : []),
    line("from", page.moment(gap.start)),
  ];

  const tell = (lines, left, top) => {
    tip.replaceChildren(...lines);
    tip.hidden = !lines.length;
    if (!lines.length) return;
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(left + 14, window.innerWidth - box.width - 8))}px`;
    tip.style.top = `${top + 18 + box.height > window.innerHeight ? Math.max(4, top - box.height - 12) : top + 18}px`;
  };
  page.hideTip = () => tell([], 0, 0);

  const under = (event) => {
    const box = canvas.getBoundingClientRect();
    const px = event.clientX - box.left;
    const lane = laneAt(event.clientY - box.top);
    const time = timeAt(px);
    if (px < page.GUTTER || time > view.to) return { lane, time: null, place: -1 };
    const reach = (3 / width(canvas)) * (view.to - view.from);
    return { lane, time, place: lane ? page.eventAt(lane, time, reach) : -1 };
  };

  let drag = null;
  canvas.addEventListener("pointerdown", (event) => {
    drag = { x: event.clientX, from: view.from, to: view.to, moved: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (drag) {
      const by = ((event.clientX - drag.x) / width(canvas)) * (drag.to - drag.from);
      drag.moved ||= Math.abs(event.clientX - drag.x) > 3;
      if (drag.moved) {
        view.set(drag.from - by, drag.to - by);
        return page.hideTip();
      }
    }
    const found = under(event);
    view.point(found.time);
    if (found.time === null || !found.lane) return page.hideTip();
    const gap = found.place < 0 ? page.gapAt(found.lane, found.time) : undefined;
    return tell(found.place >= 0 ? page.eventLines(found.place) : gap ? gapLines(gap) : [], event.clientX, event.clientY);
  });
  canvas.addEventListener("pointerup", (event) => {
    const moved = drag && drag.moved;
    drag = null;
    if (moved) return;
    const found = under(event);
    if (found.lane) view.lane = found.lane.number;
    view.event = found.place;
    view.point(found.time, true);
  });
  canvas.addEventListener("dblclick", (event) => {
    const { place } = under(event);
    if (place >= 0) view.show(events.start[place], events.end[place]);
  });
  canvas.addEventListener("pointerleave", () => {
    page.hideTip();
    if (!view.held) view.point(null);
  });
  canvas.addEventListener("wheel", (event) => {
    if (document.activeElement !== canvas && !event.ctrlKey) return;
    event.preventDefault();
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) view.pan((event.deltaX || event.deltaY) / 1000);
    else view.zoom(1.0015 ** event.deltaY, under(event).time ?? undefined);
  }, { passive: false });

  const step = (by) => {
    const lane = lanes[view.lane];
    if (!lane) return;
    let next = view.event >= 0 && events.lane[view.event] === view.lane ? view.event + by : page.firstBehind(lane, view.from);
    next = Math.min(Math.max(next, lane.from), lane.to - 1);
    view.select(next);
    const box = canvas.getBoundingClientRect();
    tell(page.eventLines(next), box.left + x(events.start[next]), box.top + rowTop(view.lane) + ROW);
  };
  const keys = {
    ArrowLeft: () => view.pan(-0.2), ArrowRight: () => view.pan(0.2), "+": () => view.zoom(0.6), "=": () => view.zoom(0.6),
    "-": () => view.zoom(1 / 0.6), 0: () => view.set(0, page.finish), Home: () => view.set(0, page.finish),
    ArrowUp: () => { view.lane = Math.max(view.lane - 1, 0); view.changed("point"); },
    ArrowDown: () => { view.lane = Math.min(view.lane + 1, lanes.length - 1); view.changed("point"); },
    n: () => step(1), p: () => step(-1),
    Escape: () => { view.held = false; view.event = -1; view.point(null); page.hideTip(); },
  };
  canvas.addEventListener("keydown", (event) => {
    const act = keys[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act();
  });
  for (const kind of ["focus", "blur"]) canvas.addEventListener(kind, () => view.changed("point"));

  const toOverview = (event) => {
    const box = overview.getBoundingClientRect();
    const time = ((event.clientX - box.left - page.GUTTER) / width(overview)) * page.finish;
    const half = (view.to - view.from) / 2;
    view.set(time - half, time + half);
  };
  overview.addEventListener("pointerdown", (event) => {
    overview.setPointerCapture(event.pointerId);
    toOverview(event);
  });
  overview.addEventListener("pointermove", (event) => event.buttons && toOverview(event));

  // Only events whose name or module has `words` keep their colour. Returns how many there are, null for no words.
  page.find = (words) => {
    const wanted = words.trim().toLowerCase();
    matches = null;
    if (wanted) {
      const texts = new Set();
      page.model.texts.forEach((text, number) => text.toLowerCase().includes(wanted) && texts.add(number));
      matches = new Set();
      for (let k = 0; k < events.id.length; k++) if (texts.has(events.name[k]) || texts.has(events.module[k])) matches.add(k);
    }
    view.changed("range");
    return matches && [...matches];
  };

  page.drawTimeline = () => {
    draw();
    drawOverview();
  };
  view.onChange(({ range }) => {
    draw();
    if (range) drawOverview();
  });
  canvas.setAttribute("aria-label", `Timeline of ${page.placeOf.size} kernels and copies on ${lanes.length} lanes`);
})();

"use strict";
// Memory by class under the budget, and the use of each lane, drawn by uPlot in the range of the timeline.

(() => {
  const { view, model, stays, lanes, events } = page;
  const classes = model.classes;
  const outside = Object.values(model.budget.outside).reduce((sum, size) => sum + size, 0);

  // By device: times, and for each class its bytes from each time on.
  const levels = model.memory.map(({ device, changes, peak }) => {
    const times = [];
    const held = classes.map(() => []);
    const now = new Array(classes.length).fill(0);
    changes.time.forEach((time, k) => {
      if (!times.length || times[times.length - 1] !== time) {
        times.push(time);
        held.forEach((column, number) => column.push(now[number]));
      }
      now[changes.class[k]] += changes.bytes[k];
      held[changes.class[k]][times.length - 1] = now[changes.class[k]];
    });
    if (!times.length) {
      times.push(0);
      held.forEach((column) => column.push(0));
    }
    // Typed columns, and their sum, for the loops below.
    const columns = held.map((column) => Float64Array.from(column));
    const total = Float64Array.from(times, (_, k) => columns.reduce((sum, column) => sum + column[k], 0));
    return { device, peak, times: Float64Array.from(times), held: columns, total };
  });
  page.levels = levels;
  let shown = 0;

  const placeAt = (times, time) => {
    let low = 0;
    let high = times.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (times[middle] <= time) low = middle + 1;
      else high = middle;
    }
    return low - 1;
  };

  // What a device holds at `time`: bytes of each class, and the values, the largest first.
  page.memoryAt = (time, number = shown) => {
    const { device, times, held } = levels[number];
    const place = Math.max(placeAt(times, time), 0);
    const byAddress = new Map();
    for (let k = 0; k < stays.start.length; k++) {
      if (stays.device[k] !== device || stays.start[k] > time || stays.end[k] <= time) continue;
      // A result that was written over its input: the later one is what lies there.
      const before = byAddress.get(stays.addr[k]);
      if (before === undefined || stays.start[before] <= stays.start[k]) byAddress.set(stays.addr[k], k);
    }
    const values = [...byAddress.values()].sort((a, b) => stays.size[b] - stays.size[a]);
    return { bytes: held.map((column) => column[place]), values };
  };

  // At most two points for each pixel: the fullest moment of it, and its end.
  const thinned = ({ times, total }, wide) => {
    const first = Math.max(placeAt(times, view.from), 0);
    const last = placeAt(times, view.to);
    const places = [];
    if (last - first < wide * 2) {
      for (let k = first; k <= last; k++) places.push(k);
    } else {
      const scale = wide / (view.to - view.from);
      let column = -1;
      let best = first;
      let most = -1;
      for (let k = first; k <= last; k++) {
        const here = Math.floor((times[k] - view.from) * scale);
        if (here !== column) {
          if (column >= 0) places.push(best, ...(k - 1 > best ? [k - 1] : []));
          else places.push(first);
          column = here;
          most = -1;
        }
        if (total[k] > most) {
          most = total[k];
          best = k;
        }
      }
      places.push(best, ...(last > best ? [last] : []));
    }
    const at = places.map((k) => Math.max(times[k], view.from));
    at.push(view.to);
    places.push(places[places.length - 1]);
    return { at, places };
  };

  const memoryData = (wide) => {
    const level = levels[shown];
    const { at, places } = thinned(level, wide);
    const sums = new Array(places.length).fill(outside);
    const columns = [[...sums]];
    for (const column of level.held) {
      places.forEach((k, number) => (sums[number] += column[k]));
      columns.push([...sums]);
    }
    return [at, ...columns.reverse()];
  };

  const useData = (wide) => {
    const bins = Math.max(10, Math.floor(wide / 6));
    const size = (view.to - view.from) / bins;
    const at = Array.from({ length: bins }, (_, k) => view.from + (k + 0.5) * size);
    const columns = used().map((lane) => {
      const busy = new Array(bins).fill(0);
      for (let k = page.firstBehind(lane, view.from); k < lane.to && events.start[k] < view.to; k++) {
        const start = Math.max(events.start[k], view.from);
        const end = Math.min(events.end[k], view.to);
        const to = Math.min(Math.floor((end - view.from) / size), bins - 1);
        for (let bin = Math.floor((start - view.from) / size); bin <= to; bin++) {
          busy[bin] += Math.max(0, Math.min(end, view.from + (bin + 1) * size) - Math.max(start, view.from + bin * size));
        }
      }
      return busy.map((time) => Math.min(100, (100 * time) / size));
    });
    return [at, ...columns];
  };

  // The lanes of the device whose memory is shown, and of the host.
  const used = () => lanes.filter((lane) => lane.device === levels[shown].device || !levels.some((level) => level.device === lane.device));
  const laneColors = ["--resident", "--reload", "--offload", "--between", "--attention", "--other"];
  const dashes = [[], [8, 3], [2, 3], [8, 3, 2, 3], [5, 2], [1, 2]];
  const stepped = uPlot.paths.stepped({ align: 1 });
  const charts = {};

  const axes = (values) => [
    { show: false, size: 0 },
    {
      size: page.GUTTER, stroke: page.color("--muted"), font: "12px system-ui, sans-serif", values,
      grid: { stroke: page.color("--line"), width: 1 }, ticks: { stroke: page.color("--line") },
    },
  ];

  const options = (host, tall, series, y, values, hooks) => ({
    width: Math.max(host.clientWidth, 200), height: tall, padding: [8, page.RIGHT, 6, 0], legend: { show: false },
    scales: { x: { time: false, range: () => [view.from, view.to] }, y: { range: y } },
    axes: axes(values), series: [{}, ...series],
    cursor: { y: false, points: { show: false }, drag: { x: true, y: false, setScale: false } },
    hooks: {
      ...hooks,
      setSelect: [(chart) => {
        const { left, width } = chart.select;
        if (width > 3) view.set(chart.posToVal(left, "x"), chart.posToVal(left + width, "x"));
        chart.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
      }],
    },
  });

  const lineAt = (chart, value, axis, color, dash, text) => {
    const { ctx, bbox } = chart;
    const ratio = window.devicePixelRatio || 1;
    const at = Math.round(chart.valToPos(value, axis, true));
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = page.color(color);
    ctx.lineWidth = 1.5 * ratio;
    ctx.setLineDash(dash.map((each) => each * ratio));
    ctx.beginPath();
    if (axis === "y") {
      ctx.moveTo(bbox.left, at);
      ctx.lineTo(bbox.left + bbox.width, at);
    } else {
      ctx.moveTo(at, bbox.top);
      ctx.lineTo(at, bbox.top + bbox.height);
    }
    ctx.stroke();
    ctx.font = `${12 * ratio}px system-ui, sans-serif`;
    if (axis === "y" && text) {
      ctx.textAlign = "right";
      ctx.textBaseline = "bottom";
      ctx.fillText(text, bbox.left + bbox.width - 4 * ratio, at - 3 * ratio);
    }
    ctx.restore();
  };
  const overlays = (chart) => {
    if (model.gate !== null && model.gate > view.from && model.gate < view.to) lineAt(chart, model.gate, "x", "--gate", [2, 3], "");
    if (view.at !== null && view.at >= view.from && view.at <= view.to) lineAt(chart, view.at, "x", "--ink", view.held ? [] : [4, 3], "");
  };

  const sizes = (chart, splits) => splits.map((size) => page.bytes(size));
  const roundSizes = (most) => {
    const raw = most / 5;
    const power = 2 ** Math.floor(Math.log2(Math.max(raw, 1)));
    const step = raw > power * 1.5 ? power * 2 : power;
    return Array.from({ length: Math.floor(most / step) + 1 }, (_, k) => k * step);
  };

  const make = () => {
    for (const chart of Object.values(charts)) chart.destroy();
    const host = page.byId("memory");
    const panel = page.color("--panel");
    const most = Math.max(model.budget.total, levels[shown].peak + outside) * 1.1;
    const order = [...page.classColors].reverse().concat("--outside");
    const series = order.map((color) => ({
      fill: page.color(color), stroke: panel, width: 0.5, paths: stepped, points: { show: false },
    }));
    const memory = options(host, 230, series, () => [0, most], sizes, {
      draw: [(chart) => {
        const free = model.budget.total - outside - levels[shown].peak;
        lineAt(chart, model.budget.total, "y", "--limit", [], `budget ${page.bytes(model.budget.total)}, ${page.bytes(Math.max(free, 0))} never used`);
        overlays(chart);
      }],
    });
    memory.axes[1].splits = () => roundSizes(most);
    const wide = () => Math.max(host.clientWidth - page.GUTTER - page.RIGHT, 50);
    charts.memory = new uPlot(memory, memoryData(wide()), host);

    const below = page.byId("use");
    const use = options(
      below, 110,
      used().map((lane, k) => ({
        stroke: page.color(laneColors[k % 6]), width: 1.75, dash: dashes[k % 6], points: { show: false },
      })),
      () => [0, 104], (chart, splits) => splits.map((share) => `${share} %`), { draw: [overlays] },
    );
    use.axes[1].splits = () => [0, 50, 100];
    charts.use = new uPlot(use, useData(wide()), below);
    for (const chart of Object.values(charts)) {
      chart.over.addEventListener("pointermove", (event) => {
        const box = chart.over.getBoundingClientRect();
        view.point(chart.posToVal(event.clientX - box.left, "x"));
      });
      chart.over.addEventListener("pointerleave", () => view.held || view.point(null));
      chart.over.addEventListener("click", (event) => {
        const box = chart.over.getBoundingClientRect();
        view.point(chart.posToVal(event.clientX - box.left, "x"), true);
      });
    }
  };

  const keys = () => {
    const item = (color, text) => page.node("span", {}, page.swatch(color), text);
    page.byId("memory-key").replaceChildren(
      ...(outside ? [item("--outside", "adapters, gradients, optimizer, batch")] : []),
      ...classes.map((name, k) => item(page.classColors[k], name)),
    );
    page.byId("use-key").replaceChildren(...used().map((lane, k) => {
      const mark = page.swatch(laneColors[k % 6]);
      if (dashes[k % 6].length) {
        mark.className = "dash";
        mark.style.background = "none";
        mark.style.borderColor = `var(${laneColors[k % 6]})`;
      }
      return page.node("span", {}, mark, lane.label);
    }));
    if (levels.length < 2) return;
    page.byId("memory-devices").replaceChildren(...levels.map(({ device }, number) => page.node("button", {
      type: "button", "aria-pressed": String(number === shown),
      onclick: () => {
        shown = number;
        keys();
        make();
        view.changed("point");
      },
    }, `device ${device}`)));
  };

  const redraw = () => {
    const host = page.byId("memory");
    const wide = Math.max(host.clientWidth - page.GUTTER - page.RIGHT, 50);
    charts.memory.setData(memoryData(wide));
    charts.use.setData(useData(wide));
  };

  page.drawCharts = () => {
    if (!levels.length) return;
    keys();
    make();
  };
  view.onChange(({ range }) => {
    if (!levels.length) return;
    if (range) redraw();
    else for (const chart of Object.values(charts)) chart.redraw(false, false);
  });

  // The three lists below the charts.
  const cell = (text, number = false) => page.node("td", number ? { class: "number" } : {}, text);
  const fullest = levels.map(({ times, total }) => times[total.indexOf(total.reduce((most, each) => Math.max(most, each), 0))]);
  page.drawLive = () => {
    if (!levels.length) return;
    const time = view.at ?? fullest[shown];
    page.byId("live-time").textContent = `${view.at === null ? "Fullest, at" : "At"} ${page.moment(time)}`;
    const { bytes, values } = page.memoryAt(time);
    const total = bytes.reduce((sum, each) => sum + each, 0);
    const row = (color, name, size) => page.node("tr", {}, page.node("td", {}, page.swatch(color), name), cell(page.bytes(size), true));
    page.byId("live-classes").replaceChildren(page.node("tbody", {},
      ...classes.map((name, k) => row(page.classColors[k], name, bytes[k])),
      ...Object.entries(model.budget.outside).map(([name, size]) => row("--outside", name, size)),
      row("--soft", "free in the budget", Math.max(model.budget.total - outside - total, 0)),
    ));
    page.byId("live-values").replaceChildren(page.node("tbody", {}, ...values.slice(0, 9).map((k) => page.node("tr", {},
      page.node("td", {}, page.swatch(page.classColors[stays.class[k]]), page.name(page.valueName(stays.value[k]))),
      cell(page.bytes(stays.size[k]), true),
    )), page.node("tr", {}, cell(values.length > 9 ? `and ${values.length - 9} more` : `${values.length} in all`), cell("", true))));
    page.byId("live-lanes").replaceChildren(page.node("tbody", {}, ...lanes.map((lane) => {
      const k = page.eventAt(lane, time, 0);
      const gap = k < 0 ? page.gapAt(lane, time) : undefined;
      const text = k >= 0 ? page.text(events.name[k]) : gap ? `${page.causes[gap.cause]}${gap.what ? `: ${gap.what}` : ""}` : "";
      return page.node("tr", {}, page.node("td", {}, lane.label), cell(page.name(text)));
    })));
  };
  view.onChange(({ point }) => point && page.drawLive());
})();

"use strict";
// Tables that sort by a click on their heads and that a text filters; the shares of idle time of each lane.

(() => {
  const { model, events, view } = page;
  const FIRST = 100;

  // `columns`: name, `sort` (row → number or text), `show` (row → text or node), `number` for the right side.
  // `foot`: rows → cells of the last line. `detail`: row → nodes that a click on its first button opens.
  page.table = (host, rows, columns, { name, text, foot = null, detail = null, sorted = 1, tools = [] }) => {
    let by = sorted;
    let down = true;
    let all = false;
    const open = new Set();
    const filter = page.node("input", { type: "search", placeholder: "filter", "aria-label": `Filter ${name}`, autocomplete: "off" });
    const count = page.node("output", { class: "muted" });
    const body = page.node("tbody");
    const last = page.node("tfoot");
    const heads = columns.map((column, number) => page.node("th", { scope: "col", class: column.number ? "number" : "" },
      page.node("button", { type: "button", onclick: () => {
        down = by === number ? !down : Boolean(column.number);
        by = number;
        draw();
      } }, column.name)));
    const made = page.node("table", { class: "wide" }, page.node("thead", {}, page.node("tr", {}, ...heads)), body, last);
    const more = page.node("button", { type: "button", onclick: () => {
      all = !all;
      draw();
    } });
    let given = rows;

    const line = (row) => {
      const cells = columns.map((column, number) => {
        const found = page.node("td", column.number ? { class: "number" } : {}, column.show(row));
        if (detail && number === 0) {
          const opened = open.has(row);
          found.prepend(page.node("button", {
            type: "button", "aria-expanded": String(opened), "aria-label": "Details",
            onclick: () => {
              if (opened) open.delete(row);
              else open.add(row);
              draw();
            },
          }, opened ? "−" : "+"), " ");
        }
        return found;
      });
      const lines = [page.node("tr", {}, ...cells)];
      if (open.has(row)) lines.push(page.node("tr", {}, page.node("td", { class: "detail", colspan: String(columns.length) }, ...detail(row))));
      return lines;
    };

    const draw = () => {
      const wanted = filter.value.trim().toLowerCase();
      const found = given.filter((row) => !wanted || text(row).toLowerCase().includes(wanted));
      const { sort } = columns[by];
      found.sort((a, b) => {
        const [one, other] = [sort(a), sort(b)];
        const order = one < other ? -1 : one > other ? 1 : 0;
        return down ? -order : order;
      });
      heads.forEach((head, number) => {
        head.setAttribute("aria-sort", number !== by ? "none" : down ? "descending" : "ascending");
        head.firstChild.textContent = columns[number].name + (number !== by ? "" : down ? " ▾" : " ▴");
      });
      const shown = all ? found : found.slice(0, FIRST);
      body.replaceChildren(...shown.flatMap(line));
      last.replaceChildren(...(foot ? [page.node("tr", {}, ...foot(found).map((cell, number) => page.node("td", columns[number].number ? { class: "number" } : {}, cell)))] : []));
      count.textContent = `${found.length} of ${given.length}`;
      more.hidden = found.length <= FIRST;
      more.textContent = all ? `The first ${FIRST} alone` : `All ${found.length}`;
    };
    filter.addEventListener("input", draw);
    host.replaceChildren(
      page.node("div", { class: "bar" }, filter, count, ...tools),
      page.node("div", { class: "table-wrap", tabindex: "0", role: "region", "aria-label": name }, made), more,
    );
    draw();
    return (next) => {
      given = next;
      open.clear();
      draw();
    };
  };

  const showButton = (start, end) => page.node("button", {
    type: "button", "aria-label": `Show in the timeline at ${page.moment(start)}`,
    onclick: () => {
      view.show(start, end);
      page.byId("timeline").scrollIntoView({ block: "center" });
    },
  }, "show");
  const sum = (rows, of) => rows.reduce((total, row) => total + of(row), 0);
  const bytes = (name, of) => ({ name, number: true, sort: of, show: (row) => (of(row) ? page.bytes(of(row)) : "–") });
  const seconds = (name, of) => ({ name, number: true, sort: of, show: (row) => (of(row) ? page.seconds(of(row)) : "–") });
  const total = (column, rows) => (rows.length ? column.show(rows.reduce((made, row) => {
    for (const key of Object.keys(row)) if (typeof row[key] === "number") made[key] = (made[key] || 0) + row[key];
    return made;
  }, {})) : "–");

  // Modules: one by one, by layer, or those of one place in all layers together.
  const places = {
    "each module": (module) => module,
    "by layer": (module) => (module.match(/^.*?\.\d+(?=\.|$)/) || [module.split(".").slice(0, 3).join(".")])[0],
    "all layers together": (module) => module.replace(/\.\d+(?=\.|$)/g, ".*"),
  };
  const moduleRows = (place) => {
    const rows = new Map();
    for (const row of model.modules) {
      const module = place(page.text(row.module)) || "outside of modules";
      const into = rows.get(module) || { module, kernels: 0, forward: 0, backward: 0, update: 0, all: 0, again: 0, loaded: 0, saved: 0, weights: 0, activations: 0 };
      rows.set(module, into);
      const [forward, backward, update] = row.seconds;
      into.forward += forward;
      into.backward += backward;
      into.update += update;
      into.all += forward + backward + update;
      for (const key of ["kernels", "again", "loaded", "saved", "weights", "activations"]) into[key] += row[key];
    }
    return [...rows.values()];
  };
  page.drawModules = () => {
    const columns = [
      { name: "module", sort: (row) => row.module, show: (row) => page.name(row.module) },
      seconds("all", (row) => row.all), seconds("forward", (row) => row.forward), seconds("backward", (row) => row.backward),
      ...(model.phases.some((phase) => phase.name === "update") ? [seconds("update", (row) => row.update)] : []),
      seconds("computed again", (row) => row.again),
      { name: "kernels", number: true, sort: (row) => row.kernels, show: (row) => String(row.kernels) },
      bytes("loaded", (row) => row.loaded), bytes("saved", (row) => row.saved), bytes("weights that stay", (row) => row.weights),
      bytes("activations kept", (row) => row.activations),
    ];
    const buttons = page.node("span", { class: "buttons", role: "group", "aria-label": "Rows" });
    const many = moduleRows(places["each module"]).length > 40;
    const replace = page.table(page.byId("modules"), moduleRows(places[many ? "all layers together" : "each module"]), columns, {
      name: "modules", text: (row) => row.module, tools: [buttons],
      foot: (rows) => columns.map((column, number) => (number ? total(column, rows) : "together")),
    });
    for (const name of Object.keys(places)) {
      buttons.append(page.node("button", {
        type: "button", "aria-pressed": String(name === (many ? "all layers together" : "each module")),
        onclick: (event) => {
          for (const button of buttons.children) button.setAttribute("aria-pressed", String(button === event.currentTarget));
          replace(moduleRows(places[name]));
        },
      }, name));
    }
  };

  const reasons = {
    updated: "the host changes it between two steps", first: "the step loads it for the first time",
    unused: "nothing took its place: the plan wants it elsewhere",
  };
  const room = (load) => {
    if (load.reason !== "room") return reasons[load.reason];
    const [[value, size], ...others] = load.room;
    const first = `${page.valueName(value)} got ${page.bytes(size)} of its room`;
    return others.length ? `${first}, and ${others.length}${others.length > 2 ? " or more" : ""} others` : first;
  };
  const eventOf = (vertex) => page.placeOf.get(vertex);
  const nameOf = (vertex) => (eventOf(vertex) === undefined ? "" : page.text(events.name[eventOf(vertex)]) + (page.text(events.module[eventOf(vertex)]) ? ` of ${page.text(events.module[eventOf(vertex)])}` : ""));
  const needed = (load) => {
    if (load.reader < 0) return "no kernel reads it";
    const when = load.needed >= page.finish ? `in the next step, ${page.seconds(load.needed - page.finish)} after its start` : `at ${page.moment(load.needed)}`;
    return `${nameOf(load.reader)}, ${when}`;
  };
  const loadLines = (load) => {
    const k = eventOf(load.copy);
    const start = events.start[k];
    const end = events.end[k];
    const places = load.room.map(([value, size]) => `${page.valueName(value)} (${page.bytes(size)})`).join("; ");
    return page.node("p", {}, showButton(start, end), ` ${page.bytes(load.size)} from ${page.moment(start)} to ${page.moment(end)}. `,
      load.reason === "first" ? "It was not on the device before. " : load.left < 0 ? `It left in the step before, ${page.seconds(-load.left)} before that ended. ` : `It left at ${page.moment(load.left)}. `,
      load.reason === "room" ? `Its room went to: ${places}. ` : `Why: ${reasons[load.reason]}. `,
      `Needed next by ${needed(load)}`, load.reader >= 0 && load.needed < page.finish ? `, ${page.seconds(load.needed - end)} after it came.` : ".");
  };
  page.drawMoved = () => {
    const rows = model.moved.map((row) => ({ ...row, name: page.valueName(row.value), times: row.loads.length, outs: row.saves.length, why: row.loads.length ? room(row.loads[0]) : "", next: row.loads.length ? needed(row.loads[0]) : "" }));
    if (!rows.length) {
      page.byId("moved").replaceChildren(page.node("p", { class: "muted" }, "Nothing was loaded or saved: all that the step needs stays on the device."));
      return;
    }
    const columns = [
      { name: "tensor", sort: (row) => row.name, show: (row) => page.name(row.name) },
      bytes("loaded", (row) => row.loaded), bytes("saved", (row) => row.saved),
      { name: "loads", number: true, sort: (row) => row.times, show: (row) => String(row.times) },
      { name: "saves", number: true, sort: (row) => row.outs, show: (row) => String(row.outs) },
      { name: "kind", sort: (row) => Number(row.weight), show: (row) => (row.weight ? "weight" : "activation") },
      { name: "why it had left", sort: (row) => row.why, show: (row) => page.name(row.why) },
      { name: "needed next by", sort: (row) => (row.loads.length ? row.loads[0].needed : 0), show: (row) => page.name(row.next) },
    ];
    page.table(page.byId("moved"), rows, columns, {
      name: "tensors that moved", text: (row) => `${row.name} ${row.why} ${row.weight ? "weight" : "activation"}`,
      detail: (row) => [
        ...row.saves.filter((vertex) => eventOf(vertex) !== undefined).map((vertex) => page.node("p", {},
          showButton(events.start[eventOf(vertex)], events.end[eventOf(vertex)]), ` Saved to the host from ${page.seconds(events.start[eventOf(vertex)])} to ${page.seconds(events.end[eventOf(vertex)])}.`)),
        ...row.loads.filter((load) => eventOf(load.copy) !== undefined).map(loadLines),
      ],
      foot: (rows) => ["together", page.bytes(sum(rows, (row) => row.loaded)), page.bytes(sum(rows, (row) => row.saved)), String(sum(rows, (row) => row.times)), String(sum(rows, (row) => row.outs)), "", "", ""],
    });
  };

  page.drawGaps = () => {
    const host = page.byId("shares");
    const item = (color, text) => page.node("span", {}, page.swatch(color), text);
    const key = page.node("div", { class: "key" }, item("--resident", "runs"), ...Object.keys(page.causes).map((cause) => item(page.causeColors[cause], page.causes[cause])));
    const bars = page.lanes.map((lane) => {
      const parts = { runs: lane.busy };
      for (const gap of lane.gaps) parts[gap.cause] = (parts[gap.cause] || 0) + gap.end - gap.start;
      const track = page.node("div", { class: "track", role: "img" });
      const words = [];
      for (const [name, time] of Object.entries(parts)) {
        const text = `${name === "runs" ? "runs" : page.causes[name]}: ${page.seconds(time)}, ${page.share(time, page.finish)}`;
        const part = page.node("div", { title: text });
        part.style.flex = `${time} 0 0`;
        part.style.background = `var(${name === "runs" ? "--resident" : page.causeColors[name]})`;
        track.append(part);
        words.push(text);
      }
      track.setAttribute("aria-label", `${lane.label}: ${words.join("; ")}`);
      const rate = lane.busy && lane.bytes ? `${page.bytes(lane.bytes)}, ${page.bytes(lane.bytes / (lane.busy / 1e9))}/s` : `${lane.count} kernels`;
      return page.node("div", { class: "share" }, page.node("div", {}, lane.label, page.node("div", { class: "muted" }, `${page.share(lane.busy, page.finish)} busy`)), track, page.node("div", { class: "muted" }, rate));
    });
    host.replaceChildren(key, ...bars);
    const rows = page.gaps.filter((gap) => gap.cause !== "done").map((gap) => ({ ...gap, seconds: gap.end - gap.start, next: nameOf(gap.then), label: page.lanes[gap.lane].label }));
    if (!rows.length) return;
    const columns = [
      { name: "lane", sort: (row) => row.lane, show: (row) => row.label },
      seconds("idle", (row) => row.seconds),
      { name: "from", number: true, sort: (row) => row.start, show: (row) => page.moment(row.start) },
      { name: "cause", sort: (row) => row.cause, show: (row) => page.causes[row.cause] },
      { name: "waited for", sort: (row) => row.what, show: (row) => page.name(row.what) },
      { name: "runs next", sort: (row) => row.next, show: (row) => page.name(row.next) },
      { name: "", sort: (row) => row.start, show: (row) => showButton(row.start, row.end) },
    ];
    page.table(page.byId("gaps"), rows, columns, {
      name: "idle gaps", text: (row) => `${row.label} ${page.causes[row.cause]} ${row.what} ${row.next}`,
      foot: (found) => ["together", page.seconds(sum(found, (row) => row.seconds)), "", "", "", "", ""],
    });
  };
})();

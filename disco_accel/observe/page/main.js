"use strict";
// Fills the page, wires its buttons and draws all again when its size or its colours change.

(() => {
  const { model, view, byId, node } = page;

  byId("title").textContent = model.title === "step" ? "One step" : `One step of ${model.title}`;
  const source = byId("source");
  source.textContent = model.source === "measured" ? "measured" : `simulated${model.estimatedFor ? ` for ${model.estimatedFor}` : ""}`;
  source.classList.add(model.source);
  byId("cards").replaceChildren(...model.headline.cards.map(([name, text]) => node("li", {}, node("b", {}, text), node("span", {}, name))));
  const prefix = model.prefix ? [`Names are shown without ${model.prefix}, with which those of all tensors begin.`] : [];
  byId("words").textContent = [...model.headline.words, ...prefix].join(" ");
  byId("choices").replaceChildren(...model.choices.flatMap(([name, text]) => [node("dt", {}, name), node("dd", {}, text)]));
  byId("figures").replaceChildren(node("tbody", {}, ...model.figures.map(([name, text]) => node("tr", {}, node("td", {}, name), node("td", { class: "number" }, text)))));
  const used = new Set(page.events.group || []);
  byId("key").replaceChildren(
    ...model.groups.flatMap((name, k) => (used.has(k) ? [node("span", {}, page.swatch(page.groupColors[k]), name)] : [])),
    ...((page.events.again || []).some((k) => k >= 0) ? [node("span", {}, page.swatch("--again"), "line below: computed again")] : []),
    ...(model.gate === null ? [] : [node("span", {}, "dotted: the gate, where the loss is handed out")]),
  );

  byId("spans").replaceChildren(
    node("button", { type: "button", onclick: () => view.set(0, page.finish) }, "all"),
    ...model.phases.map((phase) => node("button", { type: "button", onclick: () => view.set(phase.start, phase.end) }, phase.name)),
  );
  const actions = { left: () => view.pan(-0.25), right: () => view.pan(0.25), in: () => view.zoom(0.5), out: () => view.zoom(2) };
  for (const [id, act] of Object.entries(actions)) byId(id).addEventListener("click", act);
  view.onChange(({ range }) => {
    if (range) byId("range").textContent = `${page.moment(view.from)} to ${page.moment(view.to)}`;
  });

  let matches = [];
  let next = 0;
  byId("find").addEventListener("input", (event) => {
    matches = page.find(event.target.value) || [];
    next = 0;
    byId("found").textContent = event.target.value.trim() ? `${matches.length} found${matches.length ? ", Enter shows one after the other" : ""}` : "";
  });
  byId("find").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || !matches.length) return;
    const place = matches[next++ % matches.length];
    view.show(page.events.start[place], page.events.end[place]);
    view.select(place);
  });

  const themes = ["system", "light", "dark"];
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  let theme = "system";
  const apply = () => {
    document.documentElement.dataset.theme = theme === "system" ? (dark.matches ? "dark" : "light") : theme;
    byId("theme").textContent = `Colours: ${theme}`;
    page.drawTimeline();
    page.drawCharts();
  };
  byId("theme").addEventListener("click", () => {
    theme = themes[(themes.indexOf(theme) + 1) % themes.length];
    apply();
  });
  dark.addEventListener("change", apply);
  let width = 0;
  new ResizeObserver(() => {
    if (byId("timeline").clientWidth === width) return;
    width = byId("timeline").clientWidth;
    page.drawTimeline();
    page.drawCharts();
  }).observe(byId("timeline"));

  apply();
  page.drawGaps();
  page.drawMoved();
  page.drawModules();
  page.drawLive();
  view.changed("range");
  document.documentElement.dataset.ready = "true";
})();

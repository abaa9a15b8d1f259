// Draws the pictures, gives them the colours of the page, and moves the time axis. Text reaches the page as text only.
(async () => {
  "use strict";
  const items = JSON.parse(document.getElementById("figures").textContent);
  const plots = {};
  const views = [];
  for (const [name, item] of Object.entries(items)) {
    const [view] = (await Bokeh.embed.embed_item(item, document.getElementById(name))).roots;
    plots[name] = view.model;
    views.push(view);
  }
  const {lanes, axis, rates} = plots;

  const cuts = JSON.parse(document.getElementById("chart").dataset.cuts); // gaps between runs that the axis leaves out
  for (const {formatter} of axis.above) {
    const real = (place) => cuts.reduce((time, [at, left]) => (place >= at ? time + left : time), place);
    const format = formatter.doFormat.bind(formatter);
    formatter.doFormat = (ticks, options) => format(ticks.map(real), options);
  }

  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const paint = () => {
    const style = getComputedStyle(document.documentElement);
    const color = (name) => style.getPropertyValue(`--${name}`).trim();
    for (const plot of Object.values(plots)) {
      plot.outline_line_color = null;
      for (const grid of plot.center.filter((each) => each.type === "Grid")) grid.grid_line_color = color("grid");
      for (const each of [...plot.above, ...plot.below, ...plot.left]) {
        each.setv({axis_label_text_color: color("quiet"), major_label_text_color: color("text"), axis_line_color: color("line"),
          major_tick_line_color: color("line"), minor_tick_line_color: null, axis_label_text_font_style: "normal",
          major_label_text_font: "system-ui, sans-serif", axis_label_text_font: "system-ui, sans-serif"});
      }
      for (const label of plot.center.filter((each) => each.type === "Label")) label.text_color = color(label.name === "gap" ? "quiet" : "parting");
      for (const legend of plot.center.filter((each) => each.type === "Legend")) {
        legend.setv({label_text_color: color("text"), background_fill_color: color("page"), border_line_color: color("line"), label_text_font: "system-ui, sans-serif"});
      }
      for (const line of plot.center.filter((each) => each.type === "Span")) line.line_color = color("parting"); // the end of the schedule
      for (const renderer of plot.renderers) {
        const name = renderer.name.replace(/^pause /, "");
        const group = Number(name.replace(/^rate /, ""));
        const shade = name === "seam" ? color("page") : Number.isNaN(group) ? color(name) : color(["train", "loader", "code", "evaluation", "collective"][group % 5]);
        const seam = ["train", "evaluation", "loader"].includes(renderer.name) ? shade : color("page");
        renderer.glyph.setv(renderer.glyph.type === "Quad" ? {fill_color: shade, line_color: seam, hatch_color: color(name === "gap" ? "line" : "page")} : renderer.glyph.type === "Scatter" ? {line_color: shade, fill_color: shade} : {line_color: shade});
      }
    }
  };
  paint();
  dark.addEventListener("change", paint);

  const space = () => { // as many labels as fit side by side
    const most = Math.min(9, Math.max(2, Math.floor((document.getElementById("axis").clientWidth - 60) / 120)));
    for (const grid of [...axis.above, ...axis.center, ...lanes.center]) {
      if (grid.ticker?.type === "DatetimeTicker") grid.ticker.desired_num_ticks = most;
    }
  };
  space();
  window.addEventListener("resize", space);

  // A canvas that is given another size at this event is printed empty, so the pictures keep theirs, and CSS makes them smaller.
  const turn = (isPaper) => {
    const root = document.documentElement, chart = document.getElementById("chart");
    root.style.setProperty("--wide", `${chart.offsetWidth}px`);
    root.style.setProperty("--names", `${document.getElementById("labels").offsetWidth}px`);
    root.style.setProperty("--shrink", Math.min(1, 700 / chart.offsetWidth)); // A4 and Letter are wider than 700 pixels
    root.toggleAttribute("data-paper", isPaper);
    paint();
  };
  const draw = () => { for (const view of views) view.paint(); }; // at once: no frame is drawn before the page is printed
  window.addEventListener("beforeprint", () => turn(true));
  window.addEventListener("beforeprint", draw); // apart: Bokeh takes over the colours once the first listener has returned
  window.addEventListener("afterprint", () => turn(false));

  const whole = {start: lanes.x_range.start, end: lanes.x_range.end};
  const follow = (from, to) => from.x_range.change.connect(() => {
    const {start, end} = from.x_range;
    if (to.x_range.start !== start || to.x_range.end !== end) to.x_range.setv({start, end});
  });
  follow(lanes, axis);
  follow(axis, lanes);
  const show = (start, end) => lanes.x_range.setv({start, end});
  const zoom = (times) => {
    const {start, end} = lanes.x_range;
    const middle = (start + end) / 2;
    const half = Math.min(Math.max(((end - start) / 2) * times, 500), whole.end - whole.start);
    show(middle - half, middle + half);
  };
  const pan = (share) => {
    const {start, end} = lanes.x_range;
    const by = (end - start) * share;
    show(start + by, end + by);
  };
  const actions = {
    left: () => pan(-0.25), right: () => pan(0.25), in: () => zoom(0.5), out: () => zoom(2),
    all: () => show(whole.start, whole.end),
  };
  for (const button of document.querySelectorAll("[data-do]")) button.addEventListener("click", actions[button.dataset.do]);

  const list = document.getElementById("labels");
  const options = [...list.children];
  const status = document.getElementById("status");
  let chosen = -1;
  const choose = (index) => {
    if (chosen >= 0) options[chosen].setAttribute("aria-selected", "false");
    chosen = Math.min(Math.max(index, 0), options.length - 1);
    const option = options[chosen];
    option.setAttribute("aria-selected", "true");
    list.setAttribute("aria-activedescendant", option.id);
    option.scrollIntoView({block: "nearest"});
    status.textContent = option.dataset.summary;
  };
  const keys = {
    ArrowUp: () => choose(chosen - 1), ArrowDown: () => choose(chosen + 1), Home: () => choose(0),
    End: () => choose(options.length - 1), ArrowLeft: actions.left, ArrowRight: actions.right,
    "+": actions.in, "=": actions.in, "-": actions.out, "0": actions.all,
  };
  list.addEventListener("keydown", (event) => {
    const act = event.ctrlKey || event.metaKey || event.altKey ? undefined : keys[event.key];
    if (act) { event.preventDefault(); act(); }
  });
  list.addEventListener("click", (event) => {
    const index = options.indexOf(event.target.closest("li"));
    if (index >= 0) choose(index);
  });
  for (const name of ["axis", "lanes", "rates"]) { // the list of lanes has the keys, so these are no stops of their own
    const within = (root) => { for (const each of root?.querySelectorAll("*") ?? []) { if (each.tabIndex >= 0) each.tabIndex = -1; within(each.shadowRoot); } };
    within(document.getElementById(name));
  }
  document.documentElement.dataset.drawn = "yes";
})();

/* What the page does by itself: one view object is the truth; the URL, the controls and what is asked of the server follow it.
   Loaded from this machine only. Server callbacks listen to the stores `ask-NAME`, which change only if the answer would. */
(function () {
  "use strict";
  const DEFAULTS = {
    run: null, tab: "overview", rank: 0, range: null, event: null, metric: "underflow_ratio", group: "auto", order: "network",
    q: "", layer: null, grad: "scaled", open: [], kinds: ["skip", "nonfinite"], evq: "", evorder: "old", page: -1, fmt: "fp16",
    scale: null, r_init: null, r_growth: null, r_backoff: null, r_interval: null, cmp: [], align: "step", theme: "system", follow: false,
  };
  /* Controls in the order of the callback's inputs; each is shown in the property beside it. */
  const CONTROLS = ["run", "rank", "metric", "group", "order", "q", "layer", "grad", "kinds", "evq", "evorder", "fmt", "scale",
    "r_init", "r_growth", "r_backoff", "r_interval", "cmp", "align"];
  const TABS = ["overview", "layers", "events", "whatif", "compare", "findings"];
  const OF_RUN = { rank: 0, range: null, event: null, layer: null, open: [], page: -1, scale: null, r_init: null, r_growth: null,
    r_backoff: null, r_interval: null };
  const RECORDED = ["scale", "r_init", "r_growth", "r_backoff", "r_interval"];
  const FOLLOWED = 500;  /* steps shown when following begins without a zoom */

  let view = Object.assign({}, DEFAULTS);
  let started = false, paused = false, lastStep = -1, firstStep = 0, stamp = null, counter = 0;
  let status = null, statusAt = 0, chosen = null, lastBeat = null, lastTick = null;
  const shown = {}, asked = {}, recorded = {};

  const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);
  const byId = (id) => document.getElementById(id);
  const props = (id, values) => window.dash_clientside.set_props(id, values);
  const none = () => window.dash_clientside.no_update;

  /* ---- URL ---- */

  function readUrl() {
    const query = new URLSearchParams(window.location.search);
    const found = {};
    for (const [key, value] of query) {
      if (!(key in DEFAULTS)) continue;
      const like = DEFAULTS[key];
      if (key === "range") {
        const ends = value.split(":").map(Number);
        if (ends.length === 2 && ends.every(Number.isFinite) && ends[0] < ends[1]) found.range = ends;
      } else if (Array.isArray(like)) {
        found[key] = query.getAll(key).filter((v) => v !== "");
      } else if (typeof like === "number" || RECORDED.includes(key)) {
        if (value !== "" && Number.isFinite(Number(value))) found[key] = Number(value);
      } else if (typeof like === "boolean") {
        found[key] = value === "1";
      } else {
        found[key] = value;
      }
    }
    if (!TABS.includes(found.tab)) delete found.tab;
    if (!["system", "light", "dark"].includes(found.theme)) delete found.theme;
    return found;
  }

  function writeUrl(push) {
    const query = new URLSearchParams();
    for (const key of Object.keys(DEFAULTS)) {
      if (key === "page" || same(view[key], DEFAULTS[key])) continue;
      if (key === "range") query.set("range", view.range.join(":"));
      else if (Array.isArray(view[key])) (view[key].length ? view[key] : [""]).forEach((v) => query.append(key, v));
      else if (typeof view[key] === "boolean") query.set(key, view[key] ? "1" : "0");
      else query.set(key, view[key]);
    }
    const text = query.toString();
    const url = window.location.pathname + (text ? "?" + text : "");
    if (url === window.location.pathname + window.location.search) return;
    window.history[push ? "pushState" : "replaceState"]({}, "", url);
  }

  /* ---- theme ---- */

  function effective() {
    if (view.theme !== "system") return view.theme;
    return window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  }

  function paintTheme() {
    document.documentElement.dataset.theme = effective();
    props("theme", { children: "Theme: " + view.theme });
    try { window.localStorage.setItem("ampscope-theme", view.theme); } catch (e) { /* storage may be off */ }
  }

  /* ---- the view ---- */

  function set(patch, how) {
    const before = view;
    how = how || {};
    patch = Object.assign({}, patch);
    if ("run" in patch && patch.run !== view.run && !how.whole) patch = Object.assign({}, OF_RUN, patch);
    if (["kinds", "evq", "evorder"].some((k) => k in patch) && !("page" in patch)) patch.page = 0;
    view = Object.assign({}, view, patch);
    if (same(view, before) && !how.force) return;
    if (view.run !== before.run) { stamp = null; chosen = null; bar(null); }
    if (!view.event && before.event) { chosen = null; bar(null); }
    writeUrl(started && (view.tab !== before.tab || view.run !== before.run) && !how.quiet);
    ask();  /* first: the server works while the controls are drawn */
    show(before, how.force);
    props("view", { data: view });
  }

  function show(before, force) {
    if (force || view.tab !== before.tab) {
      for (const name of TABS) {
        props("panel-" + name, { hidden: name !== view.tab });
        props("tab-" + name, { "aria-selected": name === view.tab ? "true" : "false" });
      }
    }
    if (force || view.layer !== before.layer) {
      props("layer-curves", { hidden: !view.layer });
      props("layer-picture", { hidden: !view.layer });
    }
    if (force || view.theme !== before.theme) paintTheme();
    if (force || view.follow !== before.follow) props("follow", { "aria-pressed": view.follow ? "true" : "false" });
    for (const key of CONTROLS) {
      const value = RECORDED.includes(key) && view[key] === null ? recorded[key] : view[key];
      if (value === undefined || same(shown[key], value)) continue;
      shown[key] = value;
      props(key, { value: value });
    }
  }

  function ask() {
    const base = {
      run: view.run, rank: view.rank, theme: effective(), range: view.range, stamp: stamp, narrow: window.innerWidth < 640,
      mark: chosen ? chosen.step : null,
    };
    const take = (keys) => Object.assign({}, base, Object.fromEntries(keys.map((k) => [k, view[k]])));
    const wanted = {
      overview: () => ({ overview: base }),
      layers: () => Object.assign(
        { layers: take(["metric", "group", "order", "q", "open", "layer"]) }, view.layer ? { layer: take(["layer", "grad"]) } : {}),
      events: () => ({ events: take(["kinds", "evq", "evorder", "page", "event"]) }),
      whatif: () => ({ whatif: take(["fmt", "scale"]), replay: take(["r_init", "r_growth", "r_backoff", "r_interval"]) }),
      compare: () => ({ compare: take(["cmp", "align"]) }),
      findings: () => ({ findings: base }),
    }[view.tab]();
    if (!view.run) return;  /* without a stamp yet: what the first tick brings is asked for again, and sent if it differs */
    for (const name of Object.keys(wanted)) {
      if (same(asked[name], wanted[name])) continue;
      asked[name] = wanted[name];
      props("ask-" + name, { data: wanted[name] });
    }
  }

  /* ---- actions of buttons and keys ---- */

  const actions = {
    tab: (name) => set({ tab: name }),
    pause: () => {
      paused = !paused;
      props("pause", { "aria-pressed": paused ? "true" : "false", children: paused ? "Go on" : "Pause" });
      age();
    },
    follow: () => {
      if (view.follow) return set({ follow: false });
      const width = view.range ? view.range[1] - view.range[0] : Math.min(FOLLOWED, Math.max(lastStep - firstStep, 1));
      set({ follow: true, range: lastStep >= 0 ? [lastStep - width, lastStep] : view.range });
    },
    reset: () => set({ range: null, follow: false, event: null }),
    theme: () => set({ theme: { system: "light", light: "dark", dark: "system" }[view.theme] }),
    help: () => { const box = byId("help"); if (box && !box.open) box.showModal(); },
    "close-help": () => byId("help").close(),
    png: savePng,
    csv: () => { counter += 1; props("csv-ask", { data: Object.assign({ n: counter, tab: view.tab, theme: effective() }, view) }); },
    run: (name) => set({ run: name }),
    layer: (name) => set({ layer: name, tab: "layers" }),
    fold: (name) => set({ open: view.open.includes(name) ? view.open.filter((x) => x !== name) : view.open.concat([name]) }),
    "layer-step": (by) => {
      const names = (amp.rows || []).filter((r) => !r[2]).map((r) => r[1]);
      if (!names.length) return;
      const at = names.indexOf(view.layer);
      const next = at < 0 ? 0 : Math.min(Math.max(at + Number(by), 0), names.length - 1);
      set({ layer: names[next], tab: "layers" });
    },
    event: (id) => step(0, id),
    "event-step": (by) => step(Number(by)),
    "event-close": () => set({ event: null, range: null }),
    page: (number) => set({ page: Number(number) }),
    link: (text) => set(Object.assign({ open: [], q: "", event: null }, JSON.parse(text))),
    search: () => { const box = byId(view.tab === "events" ? "evq" : "q"); if (view.tab !== "events") set({ tab: "layers" });
      window.setTimeout(() => { if (box) box.focus(); }, 50); },
  };

  function step(by, id) {
    counter += 1;
    props("ask-step", { data: { n: counter, run: view.run, rank: view.rank, kinds: view.kinds, evq: view.evq, evorder: view.evorder,
      event: id || view.event, by: by, range: view.range } });
  }

  function bar(text) {
    const box = byId("event-bar");
    if (!box) return;
    props("event-bar", { hidden: !text });
    props("event-text", { children: text || "" });
  }

  function savePng() {
    const charts = document.querySelectorAll("#panel-" + view.tab + " .js-plotly-plot");
    const name = String(view.run || "run").replace(/[^\w.-]+/g, "_");
    let k = 0;
    charts.forEach((gd) => {
      if (!gd.offsetWidth || !gd._fullLayout) return;
      k += 1;
      window.Plotly.downloadImage(gd, { format: "png", scale: 2, filename: "ampscope-" + name + "-" + view.tab + (k > 1 ? "-" + k : "") });
    });
  }

  document.addEventListener("click", (event) => {
    const button = event.target.closest ? event.target.closest("[data-act]") : null;
    if (button && !button.disabled && actions[button.dataset.act]) actions[button.dataset.act](button.dataset.arg);
  });

  const keys = { n: ["event-step", "1"], p: ["event-step", "-1"], f: ["follow"], k: ["pause"], r: ["reset"], t: ["theme"], "?": ["help"],
    "[": ["layer-step", "-1"], "]": ["layer-step", "1"], "/": ["search"] };

  document.addEventListener("keydown", (event) => {
    const target = event.target;
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    if (target && (target.isContentEditable || /^(INPUT|TEXTAREA|SELECT)$/.test(target.tagName))) {
      if (event.key === "Escape") target.blur();
      return;
    }
    if (target && target.closest && target.closest("dialog") && event.key !== "?") return;
    if (target && target.getAttribute && target.getAttribute("role") === "tab" && /^Arrow(Left|Right)$/.test(event.key)) {
      const next = TABS[(TABS.indexOf(view.tab) + (event.key === "ArrowRight" ? 1 : TABS.length - 1)) % TABS.length];
      set({ tab: next });
      byId("tab-" + next).focus();
      event.preventDefault();
      return;
    }
    if (/^[1-6]$/.test(event.key)) set({ tab: TABS[Number(event.key) - 1] });
    else if (keys[event.key]) actions[keys[event.key][0]](keys[event.key][1]);
    else return;
    event.preventDefault();
  });

  window.addEventListener("popstate", () => set(Object.assign({}, DEFAULTS, { run: view.run }, readUrl()), { whole: true, quiet: true }));
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    if (started && view.theme === "system") { paintTheme(); ask(); }
  });
  let resized = 0;
  window.addEventListener("resize", () => { window.clearTimeout(resized); resized = window.setTimeout(() => { if (started) ask(); }, 300); });

  /* ---- life: "updated n s ago", and whether the server still answers ---- */

  function span(seconds) {
    if (!Number.isFinite(seconds)) return "a while";
    if (seconds < 90) return Math.max(0, Math.round(seconds)) + " s";
    if (seconds < 5400) return Math.round(seconds / 60) + " min";
    if (seconds < 129600) return Math.round(seconds / 3600) + " h";
    return Math.round(seconds / 86400) + " days";
  }

  function age() {
    const box = byId("age"), chip = byId("state");
    if (!box || !chip || !status) return;
    const passed = (window.performance.now() - statusAt) / 1000;
    const words = { live: "● live", ended: "■ ended", died: "✕ died?", empty: "… waiting" };
    chip.textContent = words[status.state] || "";
    chip.dataset.state = status.state;
    const rows = status.rows_age === null ? null : span(status.rows_age + passed) + " ago";
    const life = span(status.age + passed);
    box.textContent = (paused ? "paused, " : "") + ({
      live: rows ? "updated " + rows : "no step yet",
      ended: rows ? "updated " + rows : "without a step",
      died: "no sign of life for " + life,
      empty: "no step yet",
    }[status.state] || "");
  }
  window.setInterval(age, 1000);

  let failures = 0;
  window.setInterval(() => {
    if (document.hidden || !started) return;
    const config = JSON.parse(byId("_dash-config").textContent);
    fetch(config.requests_pathname_prefix + "health", { cache: "no-store" }).then((r) => r.ok, () => false).then((ok) => {
      failures = ok ? 0 : failures + 1;
      const lost = failures >= 2;
      if (byId("offline").hidden === lost) props("offline", {
        hidden: !lost, children: "The dashboard's server does not answer; what you see may be old. Start it again and this page goes on by itself.",
      });
    });
  }, 5000);

  /* ---- callbacks that Dash calls ---- */

  const amp = window.dash_clientside = Object.assign({}, window.dash_clientside, { ampscope: {} });
  Object.assign(amp.ampscope, {
    control: function () {
      const values = Array.prototype.slice.call(arguments, 0, CONTROLS.length);
      if (!started) {
        started = true;
        CONTROLS.forEach((key, i) => { shown[key] = values[i]; });
        let theme = null;
        try { theme = window.localStorage.getItem("ampscope-theme"); } catch (e) { /* storage may be off */ }
        const first = { run: values[0] };
        if (["system", "light", "dark"].includes(theme)) first.theme = theme;
        window.setTimeout(() => set(Object.assign(first, readUrl()), { whole: true, force: true, quiet: true }), 0);
        return none();
      }
      const patch = {};
      CONTROLS.forEach((key, i) => {
        let value = values[i];
        if (same(shown[key], value)) return;
        shown[key] = value;
        if (value === null || value === undefined) {
          if (!RECORDED.includes(key) && key !== "q" && key !== "evq") return;
          value = key === "q" || key === "evq" ? "" : null;
        }
        patch[key] = RECORDED.includes(key) && value === recorded[key] ? null : value;
      });
      if (Object.keys(patch).length) window.setTimeout(() => set(patch), 0);
      return none();
    },
    beat: function (n, data, busy) {
      const who = view.run + "\n" + view.rank, other = who !== lastBeat;
      if (!started || (!other && (n === lastTick || paused || busy || document.hidden))) return none();
      lastBeat = who;
      lastTick = n;
      return { n: n, run: view.run, rank: view.rank };
    },
    version: function (data) {
      if (!data || data.run !== view.run) return none();
      window.setTimeout(() => {
        const fresh = stamp === null;
        stamp = data.stamp;
        lastStep = data.last;
        firstStep = data.first;
        Object.assign(recorded, data.recorded || {});
        if (fresh) {  /* what was asked before the first stamp is as new as this one */
          for (const name of Object.keys(asked)) {
            if (asked[name].run === view.run && asked[name].stamp === null) asked[name] = Object.assign({}, asked[name], { stamp: stamp });
          }
          ask();
          show(view, true);
        }
        if (fresh && view.event && !chosen) step(0, view.event);
        if (view.follow && view.range && view.range[1] !== lastStep) {
          const width = view.range[1] - view.range[0];
          set({ range: [lastStep - width, lastStep] });
        }
        ask();
      }, 0);
      return none();
    },
    status: function (data) {
      if (data) { status = data; statusAt = window.performance.now(); age(); }
      return none();
    },
    relayout: function () {
      const triggered = window.dash_clientside.callback_context.triggered;
      const data = triggered && triggered.length ? triggered[0].value : null;
      if (!data || !started) return none();
      let range;
      if (data["xaxis.autorange"]) range = null;
      else if ("xaxis.range[0]" in data) range = [Number(data["xaxis.range[0]"]), Number(data["xaxis.range[1]"])];
      else if (Array.isArray(data["xaxis.range"])) range = data["xaxis.range"].map(Number);
      else return none();
      if (range && !range.every(Number.isFinite)) return none();
      if (range) range = range.map((v) => Math.round(v * 100) / 100);
      const leaves = view.follow && range && range[1] < lastStep;
      window.setTimeout(() => set(leaves || (view.follow && !range) ? { range: range, follow: false } : { range: range }), 0);
      return none();
    },
    rows: function (rows) { amp.rows = rows || []; return none(); },
    clickRow: function (click) {
      const point = click && click.points && click.points[0];
      const row = point && (amp.rows || []).find((r) => r[0] === point.y);
      if (row) window.setTimeout(() => set(row[2] ? { open: view.open.concat([row[1]]) } : { layer: row[1] }), 0);
      return none();
    },
    stepped: function (found) {
      if (!found) return none();
      window.setTimeout(() => {
        if (!found.id) { bar(found.text); return; }
        chosen = found;
        bar(found.text);
        set({ event: found.id, range: found.range, follow: false, page: -1 }, { force: true });
      }, 0);
      return none();
    },
    column: function (hover) {
      const point = hover && hover.points && hover.points[0];
      const source = document.querySelector("#layer-exponents .js-plotly-plot"), bars = document.querySelector("#layer-histogram .js-plotly-plot");
      if (!point || !source || !bars || point.curveNumber !== 0 || !source.data || !source.data.length) return none();
      const meta = source.data[0].meta, cell = source.calcdata && source.calcdata[0] && source.calcdata[0][0];
      if (!meta || !cell || !cell.z) return none();
      const steps = meta.steps;
      let at = steps.findIndex((s, i) => s <= point.x && (i === steps.length - 1 || steps[i + 1] > point.x));
      if (at < 0) at = 0;
      const shift = meta.shift[at] - meta.shift[meta.shift.length - 1];
      const lines = (bars.layout.shapes || []).map((shape, i) => meta.limits[i] - meta.shift[at]);
      const change = {};
      lines.forEach((x, i) => { change["shapes[" + i + "].x0"] = x; change["shapes[" + i + "].x1"] = x; change["annotations[" + i + "].x"] = x; });
      window.Plotly.update(bars, { y: [cell.z.map((row) => row[at] || 0)] }, shift === 0 ? {} : change, [0]);
      props("histogram-title", { children: "Step " + Number(steps[at]).toLocaleString("en") });
      return none();
    },
  });
})();

"use strict";
// Everything that moves on the page. Data come from the script element "data"; nothing is fetched.
(() => {
  const page = JSON.parse(document.getElementById("data").textContent);
  const at = (id) => document.getElementById(id);
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const narrow = () => window.innerWidth < 900;
  const config = { displaylogo: false, responsive: true, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] };
  // Okabe and Ito's palette, distinguishable with every common colour blindness: https://jfly.uni-koeln.de/color/
  const palettes = {
    light: ["#0072B2", "#E69F00", "#D55E00", "#56B4E9", "#009E73", "#CC79A7"],
    dark: ["#56B4E9", "#E69F00", "#FF8A65", "#0091EA", "#2EC4A0", "#E8A0C8"],
  };
  const isDark = () => matchMedia("(prefers-color-scheme: dark)").matches;

  // Numbers ---------------------------------------------------------------------------------------------------

  function percent(share) {
    if (!(share > 0)) return share === 0 ? "0" : "–";
    if (share < 1e-4) return "< 0.01 %";
    if (share > 0.9999 && share < 1) return "> 99.99 %";
    return `${Number((100 * share).toPrecision(3))} %`;
  }

  const raised = (exponent) => `2${String(exponent).replace(/./g, (c) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[c] ?? "⁻")}`;

  function power(value) {
    if (value === null) return "–";
    const exponent = Math.log2(value);
    return Number.isInteger(exponent) ? raised(exponent) : String(Number(value.toPrecision(6)));
  }

  function roundEven(value) {
    const whole = Math.round(value);
    return Math.abs(value % 1) === 0.5 && whole % 2 !== 0 ? whole - 1 : whole;
  }

  // What a format makes of a histogram at a scale: the arithmetic of mezzo's ExponentHistogram.coverage -----------

  // first exponent, counts by binade, [exponent, how many are that power of two exactly], zeros, infs, nans, max |x|
  function unpacked([first, counts, powers, zeros, infs, nans, max]) {
    const finite = counts.reduce((sum, count) => sum + count, 0);
    return { first, counts, powers: new Map(powers), zeros, infs, nans, max, finite };
  }

  function below(histogram, limit, hit) {
    const { first, counts, powers, max, finite } = histogram;
    if (limit > max) return finite;
    let binade = Math.floor(Math.log2(limit)); // may be one off: a logarithm is rounded
    if (2 ** binade > limit) binade -= 1;
    if (2 ** (binade + 1) <= limit) binade += 1;
    const whole = counts.slice(0, Math.max(0, binade - first)).reduce((sum, count) => sum + count, 0);
    const here = counts[binade - first] ?? 0;
    const exact = powers.get(binade) ?? 0;
    const fraction = limit / 2 ** binade; // from 1 to 2
    if (fraction === 1) return whole + (hit ? exact : 0);
    return whole + exact + roundEven((here - exact) * (fraction - 1));
  }

  function coverage(histogram, format, scale) {
    const { finite, infs, nans, zeros, max } = histogram;
    const scaled = scale * max;
    const beyond = scaled > format.over || (scaled === format.over && !format.hit);
    const overflow = beyond ? Math.max(finite - below(histogram, format.over / scale, format.hit), 1) : 0;
    const flushed = Math.min(below(histogram, format.under / scale, true), finite - overflow);
    const small = Math.min(below(histogram, (format.normal - format.under) / scale, false), finite - overflow);
    const total = finite + infs; // what is neither zero nor NaN
    return { flushed, subnormal: small - flushed, overflow: overflow + infs, total, zeros, nans };
  }

  // Curves ------------------------------------------------------------------------------------------------------

  function layout(more) {
    const axis = { gridcolor: colour("line"), zeroline: false, linecolor: colour("line") };
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: colour("text"), size: 12 },
      hoverlabel: { align: "left" }, ...more(axis),
    };
  }

  const exponents = (scales) => scales.map((scale) => (scale === null ? null : Math.log2(scale)));

  // A loss scale is a power of two: at most six ticks, each a whole one.
  function ticks(exponents) {
    const held = exponents.filter((exponent) => exponent !== null);
    const lowest = Math.floor(Math.min(0, ...held)), highest = Math.ceil(Math.max(1, ...held));
    const apart = Math.max(1, Math.ceil((highest - lowest) / 5));
    const tickvals = Array.from({ length: Math.ceil((highest - lowest) / apart) + 1 }, (_, place) => lowest + apart * place);
    return { tickvals, ticktext: tickvals.map(raised), range: [lowest - 0.5, highest + 0.5] };
  }

  function drawCurves() {
    const traces = [], palette = palettes[isDark() ? "dark" : "light"];
    let next = 0;
    for (const series of page.series) {
      const reference = page.series.length > 1 && series.policy === page.reference;
      const line = { color: reference ? colour("text") : palette[next++ % palette.length], width: reference ? 2.4 : 1.6 };
      const shared = { name: series.policy, legendgroup: series.policy, line, mode: "lines", hovertemplate: "%{y:.4g} at step %{x}" };
      if (page.series.length === 1)
        traces.push({ ...shared, x: series.step, y: series.loss, line: { ...line, width: 1 }, opacity: 0.35, showlegend: false });
      traces.push({ ...shared, x: series.step, y: series.smooth, showlegend: page.series.length > 1 });
      traces.push({
        ...shared, x: series.bad, y: series.bad.map(() => page.lowest), mode: "markers", name: "loss not finite", showlegend: false,
        marker: { symbol: "x", size: 8, color: colour("bad") }, hovertemplate: "loss not finite at step %{x}",
      });
      traces.push({ ...shared, x: series.evaluated, y: series.metric, yaxis: "y2", mode: "lines+markers", marker: { size: 5 }, showlegend: false });
      traces.push({
        ...shared, x: series.step, y: exponents(series.scale), text: series.scale.map(power), yaxis: "y3", line: { ...line, shape: "hvh" }, showlegend: false,
        hovertemplate: "scale %{text} at step %{x}",
      });
      traces.push({
        ...shared, x: series.skipped, y: exponents(series.skipped_scale), text: series.skipped_scale.map(power), yaxis: "y3", mode: "markers", showlegend: false,
        marker: { symbol: "x-thin", size: 8, line: { width: 1.5, color: colour("bad") } }, hovertemplate: "skipped at step %{x}, scale %{text}",
      });
    }
    const references = Object.entries(page.references).map(([name, value]) => ({ name, value }));
    const shown = page.series.flatMap((series) => series.metric).filter((value) => value !== null);
    const near = references.filter(({ value }) => value >= Math.min(...shown) && value <= Math.max(...shown));
    const recorded = page.steps.map((step) => ({
      type: "line", xref: "x", x0: step, x1: step, yref: "paper", y0: 0, y1: 0.02, line: { color: colour("accent"), width: 2 },
    }));
    const lines = near.map(({ value }) => ({
      type: "line", xref: "paper", x0: 0, x1: 1, yref: "y2", y0: value, y1: value, line: { color: colour("faint"), width: 1, dash: "dot" },
    }));
    const unit = `${page.metric.name}<br>(${page.metric.unit})`;
    Plotly.react("curves", traces, layout((axis) => ({
      height: 520, margin: { l: 70, r: 15, t: 10, b: 40 }, shapes: [...recorded, ...lines],
      annotations: near.map(({ name, value }) => ({
        text: name, xref: "paper", x: 1, yref: "y2", y: value, showarrow: false, xanchor: "right", yanchor: "bottom", font: { size: 10, color: colour("faint") },
      })),
      legend: { orientation: "h", y: -0.12 },
      xaxis: { ...axis, title: { text: "step" }, anchor: "y3" },
      yaxis: { ...axis, domain: [0.55, 1], title: { text: "training loss" }, type: page.logarithmic ? "log" : "linear" },
      yaxis2: { ...axis, domain: [0.28, 0.5], title: { text: unit } },
      yaxis3: { ...axis, domain: [0, 0.23], title: { text: "loss scale" }, ...ticks(page.series.flatMap((series) => exponents(series.scale))) },
    })), config);
  }

  // The heat map ------------------------------------------------------------------------------------------------

  const state = { kind: 0, format: page.format, step: page.steps.length - 1, own: true, scale: 1 };
  let ranked = null;
  const kinds = page.kinds.map((kind) => ({
    ...kind, histograms: kind.histograms.map((row) => row.map((packed) => packed && unpacked(packed))),
  }));
  const scaleOf = (kind, step) => (state.own ? (kind.scaled ? page.scales[step] : 1) : state.scale);
  const nonzero = (histogram) => Math.max(1, histogram.finite + histogram.infs);

  function limits(format, scale) {
    return [format.under, format.normal, format.over].map((limit) => Math.log2(limit / scale));
  }

  function drawHeat() {
    const kind = kinds[state.kind], format = page.formats[state.format], scale = scaleOf(kind, state.step);
    const histograms = kind.histograms.map((row) => row[state.step]);
    const held = histograms.filter((histogram) => histogram && histogram.counts.length);
    const [under, normal, over] = limits(format, scale);
    const lowest = Math.min(...held.map(({ first }) => first), Math.floor(under) - 1, 0);
    const highest = Math.max(...held.map(({ first, counts }) => first + counts.length - 1), Math.ceil(Math.min(over, 40)) + 1);
    const exponents = Array.from({ length: highest - lowest + 1 }, (_, place) => lowest + place);
    const names = kind.rows.map((_, row) => row);
    const shares = histograms.map((histogram) => exponents.map((exponent) => {
      const count = histogram?.counts[exponent - histogram.first] ?? 0;
      return count ? count / nonzero(histogram) : null;
    }));
    const covered = histograms.map((histogram) => histogram && coverage(histogram, format, scale));
    const longest = narrow() ? 22 : 42;
    const label = (name) => (name.length <= longest ? name : `${name.slice(0, longest * 0.4)}…${name.slice(-longest * 0.6)}`);
    const hover = histograms.map((histogram, row) => exponents.map((exponent) => {
      const count = histogram?.counts[exponent - histogram.first] ?? 0;
      return `${escaped(kind.rows[row])}<br>|x| from ${raised(exponent)} to ${raised(exponent + 1)}: ${count.toLocaleString("en")} values, ${percent(histogram ? count / nonzero(histogram) : NaN)}`;
    }));
    const bar = (part, title) => ({
      type: "bar", orientation: "h", xaxis: "x2", y: names, x: covered.map((each) => (each ? each[part] / Math.max(1, each.total) : null)),
      name: title, marker: { color: colour(part) },
      hovertext: covered.map((each, row) => `${escaped(kind.rows[row])}<br>${title}: ${percent(each ? each[part] / Math.max(1, each.total) : NaN)}`),
      hoverinfo: "text",
      // The number, where a bar would be too short to see.
      ...(part === "overflow" && { text: covered.map((each) => (each ? losses(each) : "")), textposition: "outside", cliponaxis: false, textfont: { size: 10 } }),
    });
    const band = (x0, x1, name) => ({
      type: "rect", xref: "x", yref: "y domain", x0, x1, y0: 0, y1: 1, layer: "above", line: { width: 0 }, fillcolor: colour(name), opacity: isDark() ? 0.22 : 0.14,
    });
    const edge = (x, name) => ({ type: "line", xref: "x", yref: "y domain", x0: x, x1: x, y0: 0, y1: 1, line: { color: colour(name), width: 1.5 } });
    const left = lowest, right = highest + 1;
    const head = (x, text, name) => ({
      x, y: 1, xref: "x", yref: "y domain", yanchor: "bottom", showarrow: false, text, font: { size: 11, color: colour(name) },
    });
    const middle = (a, b) => (Math.max(a, left) + Math.min(b, right)) / 2;
    const heads = [
      [left, under, "flushed to 0", "flushed"], [under, normal, "subnormal", "subnormal"], [normal, over, format.label, "text"], [over, right, "overflow", "overflow"],
    ].filter(([a, b]) => Math.min(b, right) - Math.max(a, left) > (narrow() ? 4 : 2));
    const height = Math.max(9, Math.min(20, 1400 / Math.max(1, names.length)));
    Plotly.react("heat", [
      {
        type: "heatmap", x: exponents.map((exponent) => exponent + 0.5), y: names, z: shares.map((row) => row.map((share) => (share ? Math.log10(share) : null))),
        customdata: shares, text: hover, hoverinfo: "text", zmin: -5, zmax: 0, xgap: 0.5, ygap: 1,
        colorscale: [[0, colour("cold")], [0.6, colour("warm")], [1, colour("hot")]],
        colorbar: {
          orientation: "h", yref: "container", y: 0, yanchor: "bottom", ypad: 16, x: 0.37, len: 0.5, thickness: 8, tickvals: [-5, -4, -3, -2, -1, 0],
          ticktext: ["≤ 0.001 %", "0.01 %", "0.1 %", "1 %", "10 %", "100 %"], tickfont: { size: 10 }, outlinewidth: 0,
        },
      },
      bar("flushed", "flushed to zero"), bar("subnormal", "subnormal"), bar("overflow", "overflowing"),
    ], layout((axis) => ({
      height: 128 + height * names.length, margin: { l: 10, r: 10, t: 26, b: 88 }, barmode: "stack", bargap: 0.25, showlegend: false,
      xaxis: { ...axis, domain: [0, 0.74], range: [left, right], title: { text: "log₂ |x|, unscaled", standoff: 12 }, dtick: right - left > 90 ? 16 : 8, showgrid: false },
      xaxis2: { ...axis, domain: [0.77, 1], range: [0, 1.5], tickvals: [0, 0.5, 1], tickformat: ".0%", title: { text: "share lost", standoff: 12 } },
      yaxis: {
        ...axis, autorange: "reversed", automargin: true, tickvals: names, ticktext: kind.rows.map((name) => escaped(label(name))), showgrid: false,
        tickfont: { size: Math.min(11, height) },
      },
      shapes: [
        band(left, Math.min(under, right), "flushed"), band(under, normal, "subnormal"), band(Math.min(over, right), right, "overflow"),
        edge(under, "flushed"), edge(normal, "subnormal"), edge(over, "overflow"),
      ].filter(({ x0, x1 }) => x1 >= left && x0 <= right && x0 <= x1),
      annotations: heads.map(([a, b, text, name]) => head(middle(a, b), text, name)),
    })), config);
    at("reading").textContent = reading(kind, format, scale, covered);
  }

  function losses({ flushed, overflow, total }) {
    const parts = [[flushed, "→ 0"], [overflow, "→ ∞"]].filter(([count]) => count > 0);
    return parts.map(([count, where]) => `${percent(count / total)} ${where}`).join(", ");
  }

  function reading(kind, format, scale, covered) {
    const sum = (part) => covered.reduce((total, each) => total + (each ? each[part] : 0), 0);
    const total = sum("total");
    const times = scale === 1 ? "" : ` × ${power(scale)}`;
    if (!covered.some((each) => each)) return `No ${kind.label} were recorded at step ${page.steps[state.step]}.`;
    if (!total) return `All ${kind.label} of step ${page.steps[state.step]} are zero or NaN.`;
    const parts = [["flushed", "are flushed to zero"], ["subnormal", "are subnormal"], ["overflow", "overflow"]];
    const said = parts.map(([part, words]) => `${sum(part) ? percent(sum(part) / total) : "none"} ${words}`).join(", ");
    const nans = sum("nans") ? ` ${sum("nans").toLocaleString("en")} values are NaN.` : "";
    return `In ${format.label}, of all ${kind.label}${times} at step ${page.steps[state.step]} that are not zero, ${said}.${nans}`;
  }

  // Worst tensors -----------------------------------------------------------------------------------------------

  function worst() {
    const format = page.formats[state.format];
    const found = [];
    kinds.forEach((kind, kindAt) => kind.name !== "updates" && kind.histograms.forEach((row, rowAt) => { // no update is kept
      let most = null;
      row.forEach((histogram, step) => {
        if (!histogram) return;
        const scale = scaleOf(kind, step), each = coverage(histogram, format, scale);
        // What is infinite or NaN spoils a step, what is zero is only missed: so the former counts first.
        const rank = [each.overflow + each.nans > 0 ? 1 : 0, (each.overflow + each.nans) / Math.max(1, each.total + each.nans), each.flushed / Math.max(1, each.total), each.subnormal / Math.max(1, each.total)];
        if (!most || before(rank, most.rank)) most = { kind, kindAt, rowAt, step, scale, histogram, each, rank };
      });
      if (most && (most.rank[0] || most.rank[2] > 0 || most.rank[3] > 0.1)) found.push(most);
    }));
    return found.sort((one, other) => (before(one.rank, other.rank) ? -1 : 1));
  }

  function before(one, other) {
    const place = one.findIndex((value, index) => value !== other[index]);
    return place >= 0 && one[place] > other[place];
  }

  function drawWorst() {
    const all = worst(), shown = all.slice(0, 15), format = page.formats[state.format];
    at("worst-text").textContent = all.length
      ? `Each at its worst recorded step, in ${format.label}${state.own ? ", gradients at the run’s own loss scale" : `, at scale ${power(state.scale)}`}; ${all.length} of ${kinds.reduce((sum, kind) => sum + (kind.name === "updates" ? 0 : kind.rows.length), 0)} lose something. A click shows one above.`
      : `In ${format.label} no value of any recorded tensor is flushed to zero or overflows, and few lose digits.`;
    const table = at("worst");
    table.replaceChildren();
    if (!all.length) return;
    const heads = ["tensor", "what", "step", "flushed", "subnormal", "overflowing", "infinite or NaN", "max |x|"];
    const row = (cells, tag) => {
      const line = document.createElement("tr");
      cells.forEach((text, place) => {
        const cell = document.createElement(tag);
        cell.textContent = text;
        if (place > 1) cell.className = "number";
        line.append(cell);
      });
      return line;
    };
    const head = table.createTHead(), body = table.createTBody();
    head.append(row(heads, "th"));
    for (const each of shown) {
      const { flushed, subnormal, overflow, total, nans } = each.each;
      const line = row([
        each.kind.rows[each.rowAt], each.kind.label, String(page.steps[each.step]), percent(flushed / Math.max(1, total)), percent(subnormal / Math.max(1, total)),
        percent(overflow / Math.max(1, total)), (each.histogram.infs + nans).toLocaleString("en"), each.histogram.max.toPrecision(4),
      ], "td");
      line.tabIndex = 0;
      line.addEventListener("click", () => change({ kind: each.kindAt, step: each.step }));
      line.addEventListener("keydown", (event) => { if (event.key === "Enter") change({ kind: each.kindAt, step: each.step }); });
      body.append(line);
    }
  }

  // Switches ------------------------------------------------------------------------------------------------------

  function escaped(text) { // plotly reads a few tags in its texts
    return text.replace(/[&<>]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;" })[c]);
  }

  function change(what) {
    Object.assign(state, what);
    const kind = kinds[state.kind], scale = scaleOf(kind, state.step);
    at("kind").value = state.kind;
    at("format").value = state.format;
    at("step").value = state.step;
    at("step-text").textContent = `${page.steps[state.step]}`;
    at("scale").value = Math.round(Math.log2(scale));
    at("scale-text").textContent = power(scale);
    at("own").disabled = state.own;
    drawHeat();
    const judged = [state.format, state.own, state.scale].join();
    if (judged !== ranked) drawWorst(); // which looks at all steps and kinds
    ranked = judged;
  }

  function connect() {
    const fill = (id, entries) => entries.forEach(({ label }, place) => at(id).add(new Option(label, place)));
    fill("kind", kinds);
    fill("format", page.formats);
    at("step").max = page.steps.length - 1;
    at("kind").addEventListener("change", (event) => change({ kind: Number(event.target.value) }));
    at("format").addEventListener("change", (event) => change({ format: Number(event.target.value) }));
    at("step").addEventListener("input", (event) => change({ step: Number(event.target.value) }));
    at("scale").addEventListener("input", (event) => change({ own: false, scale: 2 ** Number(event.target.value) }));
    at("own").addEventListener("click", () => change({ own: true }));
    at("switches").addEventListener("submit", (event) => event.preventDefault());
    const [first] = worst();
    change(first ? { kind: first.kindAt, step: first.step } : {});
  }

  function draw() {
    if (page.series.length) drawCurves();
    if (kinds.length) change({});
  }

  document.querySelectorAll("button.all").forEach((button) => button.addEventListener("click", () => {
    button.previousElementSibling.querySelectorAll("tr.more").forEach((row) => { row.hidden = false; });
    button.remove();
  }));
  if (page.series.length) drawCurves();
  if (kinds.length) connect();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
})();

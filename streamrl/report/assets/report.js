// Draws the charts of the page from the JSON in #data, with uPlot. Colours come from the style sheet, so they follow light, dark and print.
(() => {
  "use strict";
  const data = JSON.parse(document.getElementById("data").textContent);
  const HEIGHT = 210;
  const POINTS_UP_TO = 30; // a line with more values shows no dots
  const charts = [];

  // ---- numbers, as streamrl/report/units.py writes them

  const PREFIXES = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
  const NAMES = { bytes: "B", bytes_per_s: "B/s" };

  function digits(value) {
    if (value === 0) return "0";
    const size = Math.abs(value);
    return size < 1e-4 ? value.toExponential(1) : String(Number(value.toPrecision(3)));
  }

  function short(value) {
    for (const [size, prefix] of PREFIXES) if (Math.abs(value) >= size) return digits(value / size) + prefix;
    return digits(value);
  }

  const TIMES = [[3600, "h", 3 * 3600], [60, "min", 300], [1, "s", 1], [1e-3, "ms", 1e-3], [0, "µs", 0]];

  function timeUnit(seconds) {
    const size = Math.abs(seconds);
    const [scale, name] = TIMES.find(([, , from]) => size >= from);
    return [scale || 1e-6, name];
  }

  function shown(value, unit) {
    if (value === null || value === undefined) return "–";
    if (unit === "ratio") return digits(100 * value) + " %";
    if (unit === "seconds") {
      const [scale, name] = value ? timeUnit(value) : [1, "s"];
      return digits(value / scale) + " " + name;
    }
    return NAMES[unit] ? short(value).replace(/[kMGT]?$/, (prefix) => " " + prefix + NAMES[unit]) : short(value);
  }

  // Ticks of one axis share a unit and have as many decimals as their distance needs.
  function ticks(splits, unit) {
    const known = splits.filter((value) => value !== null);
    const most = Math.max(...known.map(Math.abs), 0);
    const distance = known.length > 1 ? Math.abs(known[1] - known[0]) : most || 1;
    let scale = 1, suffix = "";
    if (unit === "ratio") [scale, suffix] = [0.01, " %"];
    else if (unit === "seconds") { const [size, name] = most ? timeUnit(most) : [1, "s"]; [scale, suffix] = [size, " " + name]; }
    else { const found = PREFIXES.find(([size]) => most >= (size === 1e3 ? 1e4 : size)); if (found) [scale, suffix] = found; if (NAMES[unit]) suffix = " " + suffix + NAMES[unit]; }
    const step = distance / scale;
    if (step < 1e-4) return splits.map((value) => (value === null ? "" : Number((value / scale).toPrecision(3)).toExponential().replace("e+0", "") + suffix));
    let decimals = 0;
    while (decimals < 6 && Math.abs(step * 10 ** decimals - Math.round(step * 10 ** decimals)) > 1e-6 * 10 ** decimals * step) decimals++;
    return splits.map((value) => (value === null ? "" : (value / scale).toFixed(decimals) + suffix));
  }

  const SECOND_STEPS = [];
  for (const size of [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1, 10]) SECOND_STEPS.push(size, 2 * size, 5 * size);
  SECOND_STEPS.push(60, 120, 300, 600, 1800, 3600, 7200, 18000, 36000, 86400, 172800, 432000, 864000);

  // ---- colours

  const style = () => getComputedStyle(document.documentElement);
  const colour = (number) => style().getPropertyValue("--c" + number).trim();
  const named = (name) => style().getPropertyValue("--" + name).trim();

  function faded(text, share) {
    const number = parseInt(text.slice(1), 16);
    return `rgba(${number >> 16}, ${(number >> 8) & 255}, ${number & 255}, ${share})`;
  }

  // ---- axes

  function place(value, axis) {
    if (axis === "step") return "step " + value;
    let step = null;
    for (const [at, number] of data.steps) if (at <= value) step = number; else break;
    return digits(value) + " " + data.timeUnit + (step === null ? "" : ", after step " + step);
  }

  // A flat line gets room around it; a bound that the panel names is kept.
  function valueRange(chart) {
    return (_, low, high) => {
      const [least, most] = chart.range;
      if (low === null || high === null) [low, high] = [0, 1];
      if (least !== null) low = Math.min(low, least);
      if (most !== null) high = Math.max(high, most);
      if (low === high && chart.unit === "ratio" && low >= 0 && low <= 1) [low, high] = [0, 1];
      if (low === high) [low, high] = low === 0 ? [0, 1] : [Math.min(low, low - Math.abs(low) / 4), high + Math.abs(high) / 4];
      if (chart.kind === "stack") low = Math.min(low, 0);
      const room = (high - low) * 0.06, floor = least !== null ? least : low >= 0 ? 0 : -Infinity;
      const ceiling = most !== null ? most : chart.unit === "ratio" && high <= 1 ? 1 : Infinity;
      return [low < floor ? low - room : Math.max(low - room, floor), high > ceiling ? high + room : Math.min(high + room, ceiling)];
    };
  }

  function placeRange(_, low, high) {
    return low === null ? [0, 1] : low === high ? [low - 0.5, high + 0.5] : [low, high];
  }

  function axes(chart) {
    const common = { stroke: () => named("soft"), grid: { stroke: () => named("rule"), width: 1 }, ticks: { stroke: () => named("rule"), width: 1, size: 4 }, font: "11px system-ui, sans-serif" };
    const across = {
      ...common, label: chart.axis === "step" ? "training step" : data.timeUnit + " since the start", labelSize: 18, labelFont: "11px system-ui, sans-serif", size: 26, space: 50,
      values: (_, splits) => ticks(splits, "none"), incrs: chart.axis === "step" ? [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6] : undefined,
    };
    const up = {
      ...common, space: 30, gap: 4,
      size: (plot, values) => (values ? Math.ceil(Math.max(...values.map((text) => measure(plot, text)))) + 14 : 40),
      values: (_, splits) => ticks(splits, chart.unit), incrs: chart.unit === "seconds" ? SECOND_STEPS : undefined,
    };
    if (chart.kind === "heat") Object.assign(up, { splits: () => chart.lines.map((_, i) => i + 0.5), values: () => thinned(chart.lines.map((line) => line.name)), grid: { show: false }, ticks: { show: false } });
    return [across, up];
  }

  function measure(plot, text) {
    plot.ctx.save();
    plot.ctx.font = "11px system-ui, sans-serif";
    const width = plot.ctx.measureText(text).width;
    plot.ctx.restore();
    return width;
  }

  const thinned = (names) => names.map((name, i) => (i % Math.ceil(names.length / 10) ? "" : name));

  // ---- kinds of charts

  function stacked(chart, shown) {
    const rows = chart.lines.map(() => []);
    for (let at = 0; at < data.axes[chart.axis].length; at++) {
      const known = chart.lines.some((line) => line.values[at] !== null);
      let sum = 0;
      chart.lines.forEach((line, i) => {
        if (shown[i]) sum += line.values[at] || 0;
        rows[i].push(known ? sum : null);
      });
    }
    return rows;
  }

  function lineSeries(chart, line) {
    const again = chart.lines.slice(0, chart.lines.indexOf(line)).some((other) => other.colour === line.colour);
    const values = line.values.filter((value) => value !== null).length;
    const dots = values <= POINTS_UP_TO;
    return { label: line.name, stroke: () => colour(line.colour), width: 1.6, dash: again ? [6, 3] : undefined, spanGaps: chart.axis === "step", points: { show: dots, size: 4, fill: () => colour(line.colour) } };
  }

  function stackSeries(line) {
    return { label: line.name, stroke: () => colour(line.colour), fill: () => faded(colour(line.colour), 0.82), width: 0.5, points: { show: false } };
  }

  function heatSeries(line) {
    return { label: line.name, paths: () => null, points: { show: false } };
  }

  function drawHeat(chart) {
    const highest = Math.max(...chart.lines.flatMap((line) => line.values.map((value) => value || 0)), 1e-300);
    return (plot) => {
      const at = data.axes[chart.axis], ctx = plot.ctx, base = named("accent");
      ctx.save();
      ctx.beginPath();
      ctx.rect(plot.bbox.left, plot.bbox.top, plot.bbox.width, plot.bbox.height);
      ctx.clip();
      chart.lines.forEach((line, row) => {
        const top = plot.valToPos(row + 1, "y", true), bottom = plot.valToPos(row, "y", true);
        line.values.forEach((value, i) => {
          if (!value) return;
          const left = Math.floor(plot.valToPos(i ? at[i - 1] : at[0], "x", true)), right = Math.floor(plot.valToPos(at[i], "x", true));
          ctx.fillStyle = faded(base, 0.08 + 0.92 * Math.sqrt(value / highest));
          ctx.fillRect(left, Math.ceil(top), Math.max(right - left, 1), Math.floor(bottom - top) - 1);
        });
      });
      ctx.restore();
    };
  }

  function drawAlarm(chart) {
    return (plot) => {
      const { min, max } = plot.scales.y;
      if (chart.alarm === null || chart.alarm < min || chart.alarm > max) return;
      const y = plot.valToPos(chart.alarm, "y", true), ctx = plot.ctx;
      ctx.save();
      ctx.strokeStyle = named("bad");
      ctx.setLineDash([6, 4]);
      ctx.beginPath();
      ctx.moveTo(plot.bbox.left, y);
      ctx.lineTo(plot.bbox.left + plot.bbox.width, y);
      ctx.stroke();
      ctx.restore();
    };
  }

  // ---- one chart

  function lastKnown(values) {
    for (let i = values.length - 1; i >= 0; i--) if (values[i] !== null) return i;
    return null;
  }

  function fillLegend(chart, list, at, toggle) {
    if (chart.kind === "heat") return heatLegend(chart, list, at);
    const numbers = chart.lines.map((line, i) => {
      const item = document.createElement("li"), number = document.createElement("span");
      number.className = "number";
      const button = document.createElement("button"), swatch = document.createElement("span");
      swatch.className = "swatch c" + line.colour;
      button.type = "button";
      button.setAttribute("aria-pressed", "true");
      button.title = "Show or hide this line";
      button.addEventListener("click", () => button.setAttribute("aria-pressed", String(toggle(i))));
      button.append(swatch, line.name + " ", number);
      item.append(button);
      list.append(item);
      return number;
    });
    return (index) => {
      at.textContent = index === null ? "" : place(data.axes[chart.axis][index], chart.axis);
      chart.lines.forEach((line, i) => {
        const where = index === null ? lastKnown(line.values) : index;
        numbers[i].textContent = where === null ? "–" : shown(line.values[where], chart.unit);
      });
    };
  }

  // The scale of the colours; under the pointer the buckets that hold something.
  function heatLegend(chart, list, at) {
    const scale = document.createElement("li"), ramp = document.createElement("span"), here = document.createElement("li");
    ramp.className = "ramp";
    here.className = "number";
    scale.append("0 ", ramp, " " + shown(Math.max(...chart.lines.flatMap((line) => line.values.map((value) => value || 0))), "none") + " per second");
    list.append(scale, here);
    return (index) => {
      at.textContent = index === null ? "" : place(data.axes[chart.axis][index], chart.axis);
      here.textContent = index === null ? "" : chart.lines.filter((line) => line.values[index]).map((line) => line.name + ": " + shown(line.values[index], "none")).join("   ");
    };
  }

  function make(chart, figure) {
    const box = figure.querySelector(".plot"), visible = chart.lines.map(() => true);
    const at = data.axes[chart.axis], heat = chart.kind === "heat", stack = chart.kind === "stack";
    const rows = () => (stack ? stacked(chart, visible) : heat ? chart.lines.map((_, row) => at.map(() => row + 0.5)) : chart.lines.map((line) => line.values));
    let plot = null;
    const write = fillLegend(chart, figure.querySelector(".legend"), figure.querySelector(".at"), (i) => {
      visible[i] = !visible[i];
      plot.setSeries(i + 1, { show: visible[i] });
      if (stack) plot.setData([at, ...rows()], false);
      return visible[i];
    });
    const options = {
      width: Math.max(box.clientWidth, 120), height: HEIGHT, legend: { show: false }, padding: [8, 12, 0, 0],
      scales: { x: { time: false, range: placeRange }, y: { range: heat ? () => [0, chart.lines.length] : valueRange(chart) } },
      series: [{}, ...chart.lines.map((line) => (heat ? heatSeries(line) : stack ? stackSeries(line) : lineSeries(chart, line)))],
      bands: stack ? chart.lines.slice(1).map((_, i) => ({ series: [i + 2, i + 1] })) : undefined,
      axes: axes(chart),
      cursor: { y: false, sync: { key: chart.axis, setSeries: false }, points: { show: !heat && !stack } },
      hooks: { draw: [heat ? drawHeat(chart) : drawAlarm(chart)], setCursor: [(self) => write(self.cursor.idx === undefined ? null : self.cursor.idx)] },
    };
    plot = new uPlot(options, [at, ...rows()], box);
    write(null);
    charts.push({ plot, box });
  }

  data.charts.forEach((chart, number) => make(chart, document.getElementById("chart-" + number)));
  document.documentElement.dataset.charts = String(charts.length);

  // ---- the page changes its width, its colours, or goes to paper

  const fit = () => charts.forEach(({ plot, box }) => plot.setSize({ width: Math.max(box.clientWidth, 120), height: HEIGHT }));
  const repaint = () => charts.forEach(({ plot }) => plot.redraw(false));
  let waiting = 0;
  new ResizeObserver(() => { cancelAnimationFrame(waiting); waiting = requestAnimationFrame(fit); }).observe(document.querySelector("main"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
  addEventListener("beforeprint", () => { document.documentElement.dataset.paper = ""; repaint(); });
  addEventListener("afterprint", () => { delete document.documentElement.dataset.paper; repaint(); });
})();

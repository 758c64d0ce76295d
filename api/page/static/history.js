// Draws the last hour with uPlot, and says it in a sentence for those who do not see it.
const REFRESH_MS = 20000;
const HEIGHT = 180;
const sentence = document.getElementById("history-text");
const charts = new Map();

function columns(points) {
  const at = [], tokens = [], ended = [], failed = [], queued = [], latency = [];
  for (let i = 1; i < points.length; i++) {
    const [before, point] = [points[i - 1], points[i]];
    const minutes = (point.at - before.at) / 60;
    at.push(point.at);
    tokens.push(point.tokens_per_s);
    ended.push(Math.max(0, point.num_results - before.num_results) / minutes);
    failed.push(Math.max(0, point.num_failures - before.num_failures) / minutes);
    queued.push(point.num_queued);
    const results = point.num_results - before.num_results;
    latency.push(results > 0 && (before.latency_ms > 0 || before.num_results === 0) ? (point.latency_ms - before.latency_ms) / results / 1000 : null);
  }
  return { at, tokens, ended, failed, queued, latency };
}

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function utc(at, hasSeconds) {  // as everywhere on the pages
  return new Date(at * 1000).toISOString().slice(11, hasSeconds ? 19 : 16);
}

function draw(id, label, data, series) {
  const place = document.getElementById(id);
  const axis = { stroke: color("--quiet"), grid: { stroke: color("--line"), width: 1 }, ticks: { stroke: color("--line") } };
  const range = (_, low, high) => [0, Math.max(1, high * 1.1)];
  charts.get(place)?.destroy();
  charts.set(place, new uPlot({
    width: place.clientWidth,
    height: HEIGHT,
    cursor: { y: false },
    scales: { y: { range } },
    tzDate: (at) => uPlot.tzDate(new Date(at * 1000), "UTC"),
    padding: [null, 32, null, null],  // for the last time
    axes: [{ ...axis, space: 70, values: (_, ticks, __, ___, step_s) => ticks.map((at) => utc(at, step_s < 60)) }, { ...axis, label, size: 70 }],
    series: [{ label: "UTC", value: (_, at) => (at === null ? "–" : utc(at, true)) }, ...series],
  }, data, place));
}

async function refresh() {
  const reply = await fetch("/overview/history").catch(() => null);  // the server restarts
  if (!reply?.ok) return;
  const { at, tokens, ended, failed, queued, latency } = columns(await reply.json());
  if (at.length < 2) {
    sentence.textContent = "The charts begin a minute after the server.";
    return;
  }
  draw("tokens-chart", "tokens/s", [at, tokens], [{ label: "tokens/s", stroke: color("--bar"), width: 2, points: { show: false } }]);
  draw("latency-chart", "seconds", [at, latency], [
    { label: "mean time from submission to result", stroke: color("--bar"), width: 2, points: { size: 4 } },
  ]);
  draw("jobs-chart", "jobs", [at, ended, failed, queued], [
    { label: "done per minute", stroke: color("--bar"), width: 2, points: { show: false } },
    { label: "failed per minute", stroke: color("--bad"), width: 2, dash: [6, 3], points: { show: false } },
    { label: "waiting", stroke: color("--quiet"), width: 1.5, dash: [2, 3], points: { show: false } },
  ]);
  const last = [tokens, ended, failed, queued].map((column) => Math.round(column.at(-1)).toLocaleString("en"));
  sentence.textContent = `Last: ${last[0]} tokens/s; per minute ${last[1]} jobs done and ${last[2]} failed; ${last[3]} waiting${latency.at(-1) === null ? "" : `; a result after ${latency.at(-1).toFixed(2)} s on average`}.`;
}

refresh();
setInterval(refresh, REFRESH_MS);
addEventListener("resize", () => charts.forEach((chart, place) => chart.setSize({ width: place.clientWidth, height: HEIGHT })));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", refresh);

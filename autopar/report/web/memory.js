// Memory through the step, by part, of one pipeline rank; and the peaks of all of them.
import { draw, narrow, slider, timeAxis, tooltip } from './charts.js';
import { bar, colour, h, lazy, legend, table } from './dom.js';
import { percent, seconds, size } from './format.js';

export const PARTS = ['parameters', 'gradients', 'optimizer', 'activations', 'transients'];
const total = (parts) => parts.reduce((a, b) => a + b, 0);

// The peak of each pipeline rank against its limit.
export function peaks(plan) {
  const seen = new Set();
  const most = Math.max(...plan.stages.map((stage) => Math.max(total(Object.values(stage.memory)), stage.limit_bytes)));
  const rows = [];
  plan.stages.forEach((stage) => {
    if (seen.has(stage.rank)) return; // a device's stages share its memory
    seen.add(stage.rank);
    const sum = total(Object.values(stage.memory));
    rows.push([`rank ${stage.rank}`, bar(PARTS.map((part) => [part, part, stage.memory[part] / most]), stage.limit_bytes / most),
      size(sum), size(stage.limit_bytes), percent(sum / stage.limit_bytes, 0), ...PARTS.map((part) => size(stage.memory[part]))]);
  });
  return h('div', {}, legend([...PARTS.map((part) => [part, part]), ['limit', 'limit']]),
    table('Memory of one device at the peak of the step', [['pipeline rank', ''], ['by part', ''], ['total', 'number'], ['limit', 'number'], ['full', 'number'],
      ...PARTS.map((part) => [part, 'number'])], rows), outside(plan));
}

const PLACES = [['host', 'the host\'s memory'], ['nvme', 'NVMe']];

// What a device of each pipeline rank has outside of its own memory, against its share of the node's; null if nothing is there.
function outside(plan) {
  const used = PLACES.filter(([place]) => plan.stages.some((stage) => stage[`${place}_bytes`]));
  if (!used.length) return null;
  const limited = plan.stages.every((stage) => stage.host_limit_bytes !== undefined);
  const rows = [...new Map(plan.stages.map((stage) => [stage.rank, stage])).values()].flatMap((stage) => used.map(([place, name]) => {
    const [bytes, limit] = [stage[`${place}_bytes`], stage[`${place}_limit_bytes`]];
    return [`rank ${stage.rank}, ${name}`, size(bytes), ...(limited ? [limit ? size(limit) : '-', limit ? percent(bytes / limit, 0) : '-', bar([[name, place, limit ? Math.min(1, bytes / limit) : 0]])] : [])];
  }));
  return h('div', {}, table('Of one device, outside of its memory: optimizer states and offloaded activations', [['pipeline rank', ''], ['total', 'number'],
    ...(limited ? [['limit', 'number'], ['full', 'number'], ['', '']] : [])], rows),
  limited ? h('p', { class: 'soft' }, 'A limit is one device\'s share of what plans may use of its node.') : null,
  plan.nvme_path ? h('p', { class: 'soft' }, 'The folder on NVMe is ', h('code', {}, plan.nvme_path), '.') : null);
}

export function memory(plan) {
  const { step } = plan;
  let row = 0;
  let chart;
  const box = h('div', { class: 'chart', style: { height: '300px' }, role: 'img' });
  const holder = h('div', {});
  const points = () => {
    const rank = step.ranks[row];
    const found = rank.starts_us.map((start, i) => [start / 1e6, rank.levels[rank.memory[i]]]);
    const last = found[found.length - 1];
    return [...found, [Math.max(step.end_s, last[0]), last[1]]];
  };
  const option = () => {
    const rank = step.ranks[row];
    const found = points();
    const most = Math.max(rank.limit_bytes, ...found.map(([, parts]) => total(parts)));
    return {
      animation: false,
      grid: { left: narrow() ? 54 : 70, right: 14, top: 26, bottom: 58 },
      tooltip: { ...tooltip(), trigger: 'axis', formatter: (series) => describe(found[series[0].dataIndex]) },
      xAxis: timeAxis(step.end_s),
      yAxis: {
        type: 'value', min: 0, max: most * 1.08, axisLabel: { color: colour('soft'), showMaxLabel: false, formatter: (value) => (value ? size(value) : '0') },
        splitLine: { lineStyle: { color: colour('line') } },
      },
      dataZoom: [
        { type: 'inside', filterMode: 'none', zoomOnMouseWheel: 'ctrl', preventDefaultMouseMove: false },
        { ...slider(), filterMode: 'none' },
      ],
      series: PARTS.map((part, i) => ({
        name: part, type: 'line', stack: 'memory', step: 'end', symbol: 'none', lineStyle: { width: 0 }, emphasis: { disabled: true },
        areaStyle: { color: colour(part), opacity: 1 }, color: colour(part), data: found.map(([time, parts]) => [time, parts[i]]),
        ...(i ? {} : { markLine: {
          symbol: 'none', silent: true, lineStyle: { color: colour('limit'), width: 2, type: 'solid' }, data: [{ yAxis: rank.limit_bytes }],
          label: { formatter: `limit ${size(rank.limit_bytes)}`, position: 'insideEndTop', color: colour('text') },
        } }),
      })),
    };
  };
  const describe = ([time, parts]) => h('div', { class: 'tip' }, h('b', {}, `from ${seconds(time)} on: ${size(total(parts))}`),
    PARTS.map((part, i) => h('div', {}, `${part} ${size(parts[i])}`)));
  const show = (next) => {
    row = next;
    const rank = step.ranks[row];
    const fullest = Math.max(...points().map(([, parts]) => total(parts)));
    box.setAttribute('aria-label', `Memory of pipeline rank ${rank.rank} through the step by part: at most ${size(fullest)} of ${size(rank.limit_bytes)}. The table below has the figures.`);
    holder.replaceChildren(lazy(`Memory of pipeline rank ${rank.rank} as a table`, levels));
    if (chart) chart.setOption(option());
  };
  const levels = () => {
    const rank = step.ranks[row];
    const uses = new Map();
    rank.memory.forEach((level, i) => uses.set(level, [...(uses.get(level) || []), i]));
    return table(`Levels of memory of pipeline rank ${rank.rank}`, [['first reached', ''], ['actions', 'number'], ['total', 'number'], ...PARTS.map((part) => [part, 'number'])],
      [...uses].map(([level, at]) => [seconds(rank.starts_us[at[0]] / 1e6), `${at.length}`, size(total(rank.levels[level])), ...rank.levels[level].map(size)]));
  };
  show(0);
  const choice = h('select', { on: { change: (event) => show(Number(event.target.value)) } },
    step.ranks.map((rank, i) => h('option', { value: i }, `pipeline rank ${rank.rank} (devices ${rank.devices[0]} to ${rank.devices[0] + rank.devices[1] - 1})`)));
  const element = h('figure', {}, h('label', { class: 'tools' }, 'Through the step on ', choice), box,
    h('figcaption', {}, 'Live memory of one device at each action. In a bubble the level of the action before is drawn.'), holder);
  return { element, start: () => { chart = draw(box, option); } };
}

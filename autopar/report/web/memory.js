// Memory through the step, by component, of one pipeline rank; and the peaks of all of them.
import { bar, h, lazy, legend, svg, table } from './dom.js';
import { percent, seconds, size } from './format.js';
import { gutter, interact, redraw, RIGHT, scale } from './view.js';

export const PARTS = ['parameters', 'gradients', 'optimizer', 'activations', 'transients'];
export const NAMES = { parameters: 'parameters', gradients: 'gradients', optimizer: 'optimizer states', activations: 'activations', transients: 'buffers' };
const WORDS = { F: 'forward', B: 'backward', I: 'input gradients', W: 'weight gradients', O: 'optimizer' };
const HEIGHT = 260;
const TOP = 26; // pixels above the largest value
const total = (parts) => parts.reduce((a, b) => a + b, 0);
const columns = PARTS.map((part) => [NAMES[part], 'number']);

// The stages of each pipeline rank in turn; a device's stages share its memory.
const ranks = (plan) => [...new Map(plan.stages.map((stage) => [stage.rank, stage])).values()].sort((a, b) => a.rank - b.rank);

// The peak of each pipeline rank against its limit.
export function peaks(plan) {
  const found = ranks(plan);
  const most = Math.max(...found.map((stage) => Math.max(total(Object.values(stage.memory)), stage.limit_bytes)));
  return h('div', {}, table('Memory of one device at the peak of the step', [['pipeline rank', ''], ['by component', ''], ['total', 'number'], ['limit', 'number'], ['full', 'number'], ...columns],
    found.map((stage) => {
      const sum = total(Object.values(stage.memory));
      return [`rank ${stage.rank}`, bar(PARTS.map((part) => [NAMES[part], part, stage.memory[part] / most]), stage.limit_bytes / most),
        size(sum), size(stage.limit_bytes), percent(sum / stage.limit_bytes, 0), ...PARTS.map((part) => size(stage.memory[part]))];
    })), outside(plan));
}

const PLACES = [['host', 'the host\'s memory'], ['nvme', 'NVMe']];

// What a device of each pipeline rank has outside of its own memory, against its share of the node's; null if nothing is there.
function outside(plan) {
  const used = PLACES.filter(([place]) => plan.stages.some((stage) => stage[`${place}_bytes`]));
  if (!used.length) return null;
  const limited = plan.stages.every((stage) => stage.host_limit_bytes !== undefined);
  const rows = ranks(plan).flatMap((stage) => used.map(([place, name]) => {
    const [bytes, limit] = [stage[`${place}_bytes`], stage[`${place}_limit_bytes`]];
    return [`rank ${stage.rank}, ${name}`, size(bytes), ...(limited ? [limit ? size(limit) : '-', limit ? percent(bytes / limit, 0) : '-', bar([[name, place, limit ? Math.min(1, bytes / limit) : 0]])] : [])];
  }));
  return h('div', {}, table('Of one device, outside of its memory: optimizer states and offloaded activations', [['pipeline rank', ''], ['total', 'number'],
    ...(limited ? [['limit', 'number'], ['full', 'number'], ['', '']] : [])], rows),
  limited ? h('p', { class: 'soft' }, 'A limit is one device\'s share of what plans may use of its node.') : null,
  plan.nvme_path ? h('p', { class: 'soft' }, 'The folder on NVMe is ', h('code', {}, plan.nvme_path), '.') : null);
}

// The levels of memory of a drawn rank: start and end in seconds, bytes by component, and the action.
function levelsOf(step, rank) {
  const starts = rank.starts_us.map((start) => start / 1e6);
  return starts.map((start, i) => {
    const [kind, stage, microbatch] = [step.kinds[rank.actions[3 * i]], rank.actions[3 * i + 1], rank.actions[3 * i + 2]];
    const action = kind === 'O' ? 'optimizer step' : `${WORDS[kind]} of microbatch ${microbatch}${step.ranks.length > 1 ? `, stage ${stage}` : ''}`;
    const parts = rank.levels[rank.memory[i]];
    return { start, stop: i + 1 < starts.length ? starts[i + 1] : Math.max(step.end_s, start), parts, sum: total(parts), action };
  });
}

const peakOf = (levels) => levels.reduce((a, b) => (b.sum > a.sum ? b : a));

export function memory(plan, view) {
  const { step } = plan;
  const all = step.ranks.map((rank) => levelsOf(step, rank));
  let row = all.reduce((best, levels, i) => (peakOf(levels).sum > peakOf(all[best]).sum ? i : best), 0);
  const picture = svg('svg', { height: HEIGHT, role: 'img', class: 'stack' });
  const box = h('div', { class: 'chart' }, picture);
  const readout = h('div', { class: 'readout' });
  const holder = h('div', {});

  function draw() {
    const wide = box.clientWidth;
    if (!wide) return;
    const [levels, limit] = [all[row], step.ranks[row].limit_bytes];
    const peak = peakOf(levels);
    const most = Math.max(limit, peak.sum) * 1.02;
    const x = scale(view, box);
    const y = (bytes) => HEIGHT - 4 - bytes / most * (HEIGHT - 4 - TOP);
    const [left, right] = [gutter(), wide - RIGHT];
    const inside = (value) => Math.max(left, Math.min(right, value));
    const shown = levels.filter((one) => one.stop > view.from && one.start < view.to);
    const under = shown.map(() => 0);
    const areas = PARTS.map((part, i) => {
      const upper = shown.map((one, k) => [inside(x(one.start)), inside(x(one.stop)), under[k] + one.parts[i]]);
      const lower = upper.map(([from, to], k) => [from, to, under[k]]).reverse();
      upper.forEach(([, , bytes], k) => { under[k] = bytes; });
      const line = [...upper.flatMap(([from, to, bytes]) => [`${from.toFixed(1)} ${y(bytes).toFixed(1)}`, `${to.toFixed(1)} ${y(bytes).toFixed(1)}`]),
        ...lower.flatMap(([from, to, bytes]) => [`${to.toFixed(1)} ${y(bytes).toFixed(1)}`, `${from.toFixed(1)} ${y(bytes).toFixed(1)}`])];
      return svg('path', { d: `M${line.join('L')}Z`, class: `fill-${part}` });
    });
    const between = [1, 2, 5, 10, 20, 50].map((n) => n * 10 ** Math.floor(Math.log10(limit / 10))).find((one) => limit / one <= 5);
    const grid = Array.from({ length: Math.floor(0.92 * limit / between) + 1 }, (_, k) => k * between).map((bytes) => [
      svg('line', { x1: left, x2: right, y1: y(bytes), y2: y(bytes), class: 'grid' }),
      svg('text', { x: left - 8, y: y(bytes) + (bytes ? 4 : 0), 'text-anchor': 'end' }, bytes ? size(bytes).replace(/\.0+ /, ' ') : '0')]);
    const label = (at, text, end) => svg('text', { x: at, y: y(limit) - 8, class: 'strong', 'text-anchor': end ? 'end' : 'start' }, text);
    const atPeak = inside(x((peak.start + peak.stop) / 2));
    picture.setAttribute('width', wide);
    picture.replaceChildren(...grid.flat(), ...areas,
      svg('line', { x1: left, x2: right, y1: y(limit), y2: y(limit), class: 'limit' }), label(right, `capacity for this plan ${size(limit)}`, true),
      ...(peak.stop > view.from && peak.start < view.to ? [
        svg('line', { x1: atPeak, x2: atPeak, y1: y(peak.sum), y2: y(0), class: 'peak' }), svg('circle', { cx: atPeak, cy: y(peak.sum), r: 4, class: 'dot' })] : []),
      ...(view.cursor === null ? [] : [svg('line', { x1: x(view.cursor), x2: x(view.cursor), y1: TOP - 10, y2: y(0), class: 'cursor' })]));
    const now = view.cursor === null ? peak : levels.findLast((one) => one.start <= view.cursor) || levels[0];
    readout.replaceChildren(
      h('p', {}, h('b', {}, view.cursor === null ? `peak ${size(peak.sum)}` : size(now.sum)), ` of ${size(limit)} (${percent(now.sum / limit, 0)}), ${view.cursor === null ? 'first reached at' : 'at'} ${seconds(view.cursor === null ? peak.start : view.cursor)}: ${now.action}`),
      legend(PARTS.map((part, i) => [NAMES[part], part, size(now.parts[i])])));
  }

  const show = (next) => {
    row = next;
    const { rank, limit_bytes: limit } = step.ranks[row];
    picture.setAttribute('aria-label', `Memory of pipeline rank ${rank} through the step by component: at most ${size(peakOf(all[row]).sum)} of ${size(limit)}. The table below has the figures.`);
    holder.replaceChildren(lazy('Memory through the step as a table', levelTable));
    draw();
  };
  const levelTable = () => {
    const uses = new Map();
    step.ranks[row].memory.forEach((level, i) => uses.set(level, [...(uses.get(level) || []), i]));
    return table(`Levels of memory of pipeline rank ${step.ranks[row].rank}`, [['first reached', ''], ['actions', 'number'], ['total', 'number'], ...columns],
      [...uses].map(([level, at]) => [seconds(all[row][at[0]].start), `${at.length}`, size(total(step.ranks[row].levels[level])), ...step.ranks[row].levels[level].map(size)]));
  };
  const fullest = row;
  show(row);
  const choice = h('select', { on: { change: (event) => show(Number(event.target.value)) } },
    step.ranks.map((rank, i) => h('option', { value: i, selected: i === row }, `pipeline rank ${rank.rank}${i === fullest && step.ranks.length > 1 ? ', the fullest' : ''}`)));
  interact(box, view, () => {});
  redraw(box, draw, view);
  return h('figure', {}, step.ranks.length > 1 ? h('label', { class: 'tools' }, 'One device of ', choice) : null, readout, box,
    h('figcaption', {}, 'Live memory of one device during each action of the pipeline; in a bubble that of the action before.'), holder);
}

// Two plans side by side: their strategies, and their time and memory by component with the differences.
import { bar, h, table } from './dom.js';
import { count, percent, seconds, size } from './format.js';
import { NAMES, PARTS } from './memory.js';

const USES = [['compute_s', 'computation', 'computation'], ['communication_s', 'exposed communication', 'exposed'], ['optimizer_s', 'once a step', 'once'], ['bubble_s', 'bubble', 'hatch']];
const total = (stage) => PARTS.reduce((sum, part) => sum + stage.memory[part], 0);
const fullest = (plan) => plan.stages.reduce((a, b) => (total(b) > total(a) ? b : a));
const most = (plan, name) => Math.max(...plan.stages.map((stage) => stage[name]));
const degree = (plan, name) => (plan.ranks.groups[name] || []).reduce((product, [size_]) => product * size_, 1);

// How many layers have each value of an option, such as `recomputed 30, none 4`.
function options(plan, name) {
  const counts = new Map();
  plan.layers.forEach(([, kind]) => {
    const value = plan.kinds[kind].strategy[name] || 'none';
    counts.set(value, (counts.get(value) || 0) + 1);
  });
  return counts.size === 1 ? `${[...counts.keys()][0]}` : [...counts].sort((a, b) => b[1] - a[1]).map(([value, layers]) => `${value} (${layers} layers)`).join(', ');
}

function decisions(plans) {
  const groups = [...new Set(plans.flatMap((plan) => Object.keys(plan.ranks.groups)))].filter((name) => name !== 'ZeRO');
  const known = ['data', 'tensor', 'expert', 'sequence', 'ZeRO', 'copies', 'roles'];
  const techniques = [...new Set(plans.flatMap((plan) => plan.kinds.flatMap((kind) => Object.keys(kind.strategy))))].filter((name) => !known.includes(name));
  return [
    ['model', (plan) => plan.model], ['devices', (plan) => plan.devices], ['pipeline stages', (plan) => plan.pipeline * plan.chunks], ['PP', (plan) => plan.pipeline],
    ...groups.map((name) => [name, (plan) => degree(plan, name)]), ['ZeRO', (plan) => plan.ranks.zero],
    ['schedule', (plan) => plan.schedule], ['microbatches', (plan) => plan.microbatches], ['global batch', (plan) => count(plan.global_batch)],
    ['prefetched layers', (plan) => plan.prefetch], ['replicas', (plan) => plan.sync], ['precision', (plan) => plan.precision],
    ...techniques.map((name) => [name.replaceAll('_', ' '), (plan) => options(plan, name)]),
  ].map(([name, value]) => [name, ...plans.map((plan) => `${value(plan)}`)]);
}

const signed = (form, difference) => (Math.abs(difference) < 1e-9 ? '=' : `${difference > 0 ? '+' : '−'}${form(Math.abs(difference))}`);

// A table of components ([name, colour, first, second]; the last row is the sum); less is better.
function components(caption, names, rows, form) {
  const largest = Math.max(...rows.map(([, , a, b]) => Math.abs(b - a)));
  const [, , sum] = rows[rows.length - 1];
  return table(caption, [['', ''], ...names.map((name) => [name, 'number']), ['difference', 'number'], ['', '']], rows.map(([name, tone, a, b]) => {
    const negligible = Math.abs(b - a) < 1e-3 * sum;
    return [h('span', { class: 'key' }, h('span', { class: 'swatch', style: { background: tone ? `var(--${tone})` : 'none' } }), name), form(a), form(b),
      h('span', { class: negligible ? 'soft' : b < a ? 'better' : 'worse' }, signed(form, b - a)), negligible ? '' : change((b - a) / largest)];
  }));
}

// A bar from the middle: to the left what is less, to the right what is more.
function change(share) {
  const width = Math.abs(share) / 2;
  return h('div', { class: 'change', 'aria-hidden': 'true' }, h('span', {
    class: share < 0 ? 'less' : 'more', style: { width: `${100 * width}%`, left: `${100 * (share < 0 ? 0.5 - width : 0.5)}%` } }));
}

// With `strategies` each side begins with its plan's strategy.
export function sideBySide(plans, strategies = true) {
  const names = plans.map((plan) => plan.name);
  const [p, q] = plans.map((plan) => plan.prediction);
  const [a, b] = plans.map(fullest);
  const longest = Math.max(p.step_time_s, q.step_time_s);
  const largest = Math.max(...[a, b].flatMap((stage) => [total(stage), stage.limit_bytes]));
  const equal = plans[0].global_batch === plans[1].global_batch;
  const speed = (plan) => plan.prediction.tokens_per_s_per_device * plan.device_count;
  const ratio = speed(plans[0]) / speed(plans[1]) - 1;
  const words = Math.abs(ratio) < 5e-4 ? 'as fast as' : `${percent(Math.abs(ratio))} ${ratio > 0 ? 'slower' : 'faster'} than`;
  const rows = decisions(plans);
  const side = (plan, stage) => h('div', {}, h('h3', {}, plan.name), strategies ? h('p', { class: 'strategy' }, plan.parallelism) : null,
    h('p', { class: 'scale' }, h('span', {}, 'time of one step'), h('b', {}, seconds(plan.prediction.step_time_s))),
    bar(USES.map(([key, name, tone]) => [name, tone, plan.prediction[key] / longest])),
    h('p', { class: 'scale' }, h('span', {}, 'memory of the fullest device'), h('b', {}, size(total(stage)))),
    bar(PARTS.map((part) => [NAMES[part], part, stage.memory[part] / largest]), stage.limit_bytes / largest));
  const outside = [['in the host\'s memory', 'host_bytes'], ['on NVMe', 'nvme_bytes']].filter(([, key]) => plans.some((plan) => most(plan, key)));
  return h('div', { class: 'versus' },
    plans[0].model === plans[1].model ? h('p', { class: 'verdict' }, h('b', {}, names[1]), ` is ${words} `, h('b', {}, names[0]), equal ? '.' : ' per token: their batches differ.') : null,
    h('div', { class: 'pair two' }, side(plans[0], a), side(plans[1], b)),
    h('div', { class: 'pair two' },
      components('Time of one step, by component', names, [...USES.map(([key, name, tone]) => [name, tone, p[key], q[key]]), ['one step', null, p.step_time_s, q.step_time_s]], seconds),
      components('Memory of the fullest device, by component', names, [...outside.map(([name, key]) => [name, key.slice(0, 4), most(plans[0], key), most(plans[1], key)]),
        ...PARTS.map((part) => [NAMES[part], part, a.memory[part], b.memory[part]]), ['total', null, total(a), total(b)]], size)),
    table('Decisions that differ', [['', ''], ...names.map((name) => [name, 'long'])], rows.filter(([, one, other]) => one !== other)),
    h('details', {}, h('summary', {}, 'Decisions that are the same'), table('Decisions of both plans', [['', ''], ['both', 'long']], rows.filter(([, one, other]) => one === other).map(([name, one]) => [name, one]))));
}

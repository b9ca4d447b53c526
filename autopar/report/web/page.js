// The script of the page that `autopar report` writes. `make page` bundles it with the parts of Apache ECharts that it uses.
import { bar, h, lazy, legend, table } from './dom.js';
import { count, percent, plural, seconds, size } from './format.js';
import { memory, peaks } from './memory.js';
import { timeline } from './timeline.js';

const data = JSON.parse(document.getElementById('figures').textContent);
const { plans, comparison } = data;
const two = plans.length > 1;
const started = []; // what draws into elements that must be in the document first
const USES = [['computation', 'computation'], ['exposed communication', 'exposed'], ['sends between stages', 'send'], ['once a step', 'once'], ['bubble', 'hatch']];

const named = (plan, element) => (two ? h('div', {}, h('h3', {}, plan.name), element) : element);
const each = (make, side = 'pair two') => h('div', { class: two ? side : '' }, plans.map((plan) => named(plan, make(plan))));
const missing = (plan) => h('div', {}, plan.missing.map((text) => h('p', { class: 'note' }, text)));
const drawn = ({ element, start }) => { started.push(start); return element; };
const total = (parts) => Object.values(parts).reduce((a, b) => a + b, 0);

function summary(plan) {
  const { prediction: p } = plan;
  const fullest = plan.stages.reduce((a, b) => (total(a.memory) / a.limit_bytes > total(b.memory) / b.limit_bytes ? a : b));
  const card = (name, value, more) => h('div', {}, h('dt', {}, name), h('dd', {}, value, h('small', {}, more)));
  const batch = `${count(plan.global_batch)} in ${plural(plan.microbatches, 'microbatch', 'microbatches')}`;
  return h('div', {},
    h('p', {}, plan.description),
    h('dl', { class: 'cards' },
      card('one step', seconds(p.step_time_s), `global batch ${batch}`),
      card('tokens/s', count(Math.round(p.tokens_per_s_per_device * plan.device_count)), `${count(Math.round(p.tokens_per_s_per_device))} a device`),
      card('MFU', percent(p.mfu), `precision ${plan.precision}`),
      card('memory', size(total(fullest.memory)), `of ${size(fullest.limit_bytes)} on the fullest device`),
      plan.bound_s ? card('gap', percent(plan.gap, 2), `proved: none of those searched takes less than ${seconds(plan.bound_s)}`) : card('gap', '-', 'this plan was given, not searched'),
      card('devices', count(plan.device_count), `${plural(plan.pipeline, 'pipeline rank')} of ${plan.mesh.map((axis) => `${axis.name} ${axis.size}`).join(' x ')}`)),
    missing(plan),
    plan.notes.length ? h('details', {}, h('summary', {}, plural(plan.notes.length, 'note')), h('ul', {}, plan.notes.map((note) => h('li', {}, note)))) : null,
    plan.pins.length ? pins(plan) : null,
    h('details', {}, h('summary', {}, 'The request, and how the plan was found'),
      table('Options of the command that made the plan', [['option', ''], ['value', 'long']],
        [...Object.entries(plan.request).map(([key, value]) => [key, Array.isArray(value) ? value.join(', ') : `${value}`]),
          ['schedule', plan.schedule], ['stages of each device', `${plan.chunks}`], ['replicas', plan.sync],
          ...(plan.solver ? [['solver', plan.solver]] : []), ...(plan.wall_time_s ? [['planned in', seconds(plan.wall_time_s)]] : [])])));
}

function pins(plan) {
  const step = plan.prediction.step_time_s;
  return table('The price of each pin', [['pin', ''], ['best step without it', 'number'], ['saves', 'number'], ['at most', 'number']],
    plan.pins.map((pin) => [`${pin.pin}=${pin.value}`, seconds(pin.step_time_without_s), percent(1 - pin.step_time_without_s / step),
      percent(1 - pin.bound_without_s / step)]));
}

function compared() {
  const form = { s: seconds, B: size, '%': (share) => percent(share) };
  const text = (value, unit) => (form[unit] ? form[unit](value) : `${value}`);
  return table('Both plans', [['', ''], ...plans.map((plan) => [plan.name, 'number']), ['second / first', 'number']],
    comparison.map(([figure, a, b, unit]) => [figure, text(a, unit), text(b, unit), unit && a > 1e-9 ? (b / a).toFixed(2) : '']));
}

function timelines() {
  const windows = [];
  const end = Math.max(...plans.filter((plan) => plan.step).map((plan) => plan.step.end_s));
  return each((plan) => (plan.step ? drawn(timeline(plan, end, windows)) : missing(plan)), 'stack');
}

function time(plan) {
  const { prediction: p } = plan;
  const whole = [['computation', p.compute_s], ['exposed communication, sends included', p.communication_s], ['once a step', p.optimizer_s], ['bubble', p.bubble_s]];
  const shade = Object.fromEntries(USES);
  const slowest = table('The slowest pipeline rank', [['', ''], ['', ''], ['time', 'number'], ['share', 'number']],
    whole.map(([name, value]) => [name, bar([[name, shade[name.split(',')[0]], value / p.step_time_s]]), seconds(value), percent(value / p.step_time_s)]));
  if (!plan.step) return slowest;
  return h('div', {}, slowest, legend(USES),
    table('Every pipeline rank', [['pipeline rank', ''], ['', ''], ...USES.map(([name]) => [name, 'number'])],
      plan.step.time.map((parts, rank) => [`rank ${rank}`, bar(USES.map(([name, tone]) => [name, tone, parts[name] / plan.step.end_s])),
        ...USES.map(([name]) => seconds(parts[name]))])));
}

const chips = (strategy) => h('ul', { class: 'chips' },
  Object.entries(strategy).filter(([key]) => key !== 'roles').map(([key, value]) => h('li', {}, `${key} ${value}`)),
  h('li', {}, strategy.roles));

function kindTable(kind) {
  if (kind.forward_s === undefined) return null;
  const bytes = [...['parameters', 'gradients', 'optimizer', 'saved', 'transient'].map((name) => [name, name]),
    ...[['optimizer in the host', 'host'], ['optimizer on NVMe', 'nvme'], ['saved in the host', 'host_saved']].filter(([, name]) => kind[`${name}_bytes`])];
  return table(`One ${kind.class}, a microbatch on one device`, [['', ''], ['', 'number']],
    [['forward', seconds(kind.forward_s)], ['backward', seconds(kind.backward_s)], ['of both, exposed communication', seconds(kind.communication_s)],
      ['once a step', seconds(kind.step_s)], ...bytes.map(([title, name]) => [title, size(kind[`${name}_bytes`])])]);
}

const cost = (kind) => (kind.forward_s === undefined ? null : kind.forward_s + kind.backward_s);

// Runs of consecutive layers of one class, one strategy and one price.
function runs(plan, [start, stop]) {
  const found = [];
  for (const [name, kind] of plan.layers.slice(start, stop)) {
    const last = found[found.length - 1];
    if (last && last.kind === kind) last.names.push(name);
    else found.push({ kind, names: [name] });
  }
  return found;
}

function layers(plan) {
  const most = Math.max(...plan.stages.map((stage) => stage.microbatch_s));
  const row = (name, value, from) => h('span', { class: 'row' }, h('span', {}, name),
    value === null ? h('span', {}) : bar([[name, 'computation', value / from]]), h('span', { class: 'number' }, value === null ? '' : seconds(value)));
  const run = ({ kind, names }) => {
    const own = plan.kinds[kind];
    const label = names.length > 1 ? `${names[0]} ... ${names[names.length - 1]} (${names.length} of ${own.class})` : `${names[0]} (${own.class})`;
    const sum = cost(own) === null ? null : names.length * cost(own);
    return h('details', {}, h('summary', {}, row(label, sum, most)), chips(own.strategy), kindTable(own),
      names.length > 1 ? lazy(`${names.length} layers`, () => h('ul', {}, names.map((name) => h('li', {}, row(name, cost(own), most))))) : null);
  };
  const stage = (one, s) => h('details', { open: plan.stages.length <= 4 },
    h('summary', {}, row(`stage ${s}: ${plural(one.layers[1] - one.layers[0], 'layer')} on pipeline rank ${one.rank}, devices ${one.devices[0]} to ${one.devices[0] + one.devices[1] - 1}`, one.microbatch_s, most)),
    runs(plan, one.layers).map(run));
  const groups = []; // stages in turn that have equal layers and take equally long
  plan.stages.forEach((one, s) => {
    const key = JSON.stringify([one.microbatch_s.toPrecision(6), plan.layers.slice(...one.layers).map(([, kind]) => kind)]);
    if (plan.stages.length > 8 && groups.length && groups[groups.length - 1].key === key) groups[groups.length - 1].stages.push(s);
    else groups.push({ key, stages: [s] });
  });
  return h('div', { class: 'tree' },
    h('p', { class: 'soft' }, 'Bars and times: forward and backward of one microbatch.'),
    groups.map(({ stages }) => {
      const first = plan.stages[stages[0]];
      if (stages.length === 1) return stage(first, stages[0]);
      const words = `stages ${stages[0]} to ${stages[stages.length - 1]}: ${plural(first.layers[1] - first.layers[0], 'layer')} each, all alike`;
      return h('details', {}, h('summary', {}, row(words, first.microbatch_s, most)), runs(plan, first.layers).length === 1
        ? chips(plan.kinds[plan.layers[first.layers[0]][1]].strategy) : null,
      lazy(`${stages.length} stages`, () => h('div', {}, stages.map((s) => stage(plan.stages[s], s)))));
    }));
}

function communication(plan) {
  if (!plan.step) return missing(plan);
  const { traffic } = plan.step;
  if (!traffic.length) return h('p', {}, 'Devices exchange nothing.');
  const links = [[false, 'inside a node'], [true, 'across nodes']];
  const groups = [...new Set(traffic.map((one) => JSON.stringify([one.axis, one.ranks])))].map((key) => JSON.parse(key));
  const sum = (list, name) => list.reduce((a, one) => a + one[name], 0);
  const cells = groups.map(([axis, ranks]) => links.map(([spans]) => traffic.filter((one) => one.axis === axis && one.ranks === ranks && one.spans_nodes === spans)));
  const most = Math.max(...cells.flat().map((list) => sum(list, 'seconds')));
  return h('div', {},
    table('Sent by one device in a step, by axis and link', [['axis', ''], ['devices of a group', 'number'], ...links.map(([, name]) => [name, 'number'])],
      groups.map(([axis, ranks], i) => [axis, count(ranks), ...cells[i].map((list) => (list.length
        ? h('td', { class: 'number cell', style: { '--strength': `${0.08 + 0.42 * sum(list, 'seconds') / most}` } }, `${size(sum(list, 'bytes'))}, ${seconds(sum(list, 'seconds'))}`)
        : h('td', { class: 'number' }, '-')))])),
    h('details', {}, h('summary', {}, 'By collective'),
      table('Collectives of one device in a step', [['axis', ''], ['what', ''], ['collective', ''], ['link', ''], ['how often', 'number'], ['sent', 'number'], ['time', 'number']],
        traffic.map((one) => [one.axis, one.purpose, one.collective.replaceAll('_', ' '), links[Number(one.spans_nodes)][1], count(one.count), size(one.bytes), seconds(one.seconds)]))));
}

function why(plan) {
  const found = plan.explanation;
  if (!found) return h('div', {}, h('p', {}, 'Alternatives were not searched for this page: ', h('code', {}, 'autopar report PLAN --explain'), ' searches them, which takes minutes.'));
  const slower = (share) => (share === null ? '-' : Math.abs(share) < 5e-4 ? 'this time' : `${share > 0 ? '+' : ''}${percent(share)}`);
  const list = (texts) => h('ul', {}, texts.map((text) => h('li', {}, text)));
  return h('div', {},
    h('h3', {}, 'What binds'), found.binding.length ? list(found.binding.map((one) => one.text)) : h('p', {}, 'Nothing that was tried.'),
    h('h3', {}, 'What more or less would be worth'), list(found.shadow_prices.map((one) => one.text)),
    table('The best plan with ...', [['', ''], ['step', 'number'], ['slower', 'number'], ['memory', 'number'], ['plan, or why there is none', 'long']],
      found.families.map((one) => [one.title, one.feasible ? seconds(one.step_time_s) : '-', one.feasible ? slower(one.slower) : '-',
        one.feasible ? size(one.memory_bytes) : '-', one.feasible ? one.chosen ? 'this plan' : one.summary : one.reason])),
    table('The best configurations', [['', ''], ['step', 'number'], ['slower', 'number'], ['memory', 'number'], ['plan', 'long']],
      found.alternatives.map((one, i) => [`${i + 1}`, seconds(one.step_time_s), slower(one.slower), size(one.memory_bytes), one.summary])),
    found.alternatives_complete ? null : h('p', { class: 'note' }, 'There was no time to look at every configuration.'));
}

function provenance(plan) {
  if (!plan.provenance.length) return missing(plan);
  const rows = plan.provenance.map((one) => [one.figure, Number(one.value).toLocaleString('en', { maximumSignificantDigits: 4 }), one.unit, one.source]);
  const make = (wanted) => table(`${plural(wanted.length, 'figure')} of ${rows.length}`, [['figure', ''], ['value', 'number'], ['unit', ''], ['source', 'long']], wanted);
  const holder = h('div', {}, make(rows));
  const search = h('input', { type: 'search', on: { input: (event) => {
    const text = event.target.value.toLowerCase();
    holder.replaceChildren(make(rows.filter((row) => row.some((cell) => cell.toLowerCase().includes(text)))));
  } } });
  return h('details', {}, h('summary', {}, `${plural(rows.length, 'figure')} with their sources`), h('label', { class: 'tools' }, 'Search ', search), holder);
}

const SECTIONS = [
  ['summary', 'Summary', 'Summary', '', () => each(summary)],
  ...(two ? [['comparison', 'Side by side', 'Side by side', '', compared]] : []),
  ['timeline', 'Timeline', 'Pipeline timeline', 'The predicted step: every microbatch on every pipeline rank.', timelines],
  ['time', 'Time', 'Where the time goes', '', () => each(time)],
  ['memory', 'Memory', 'Memory', '', () => each((plan) => h('div', {}, peaks(plan), plan.step ? drawn(memory(plan)) : missing(plan)))],
  ['layers', 'Layers', 'Stages and layers', '', () => each(layers)],
  ['communication', 'Communication', 'Communication', 'Per device, the mean of all pipeline ranks. Times are those of the whole exchange, hidden under computation or not.', () => each(communication)],
  ['why', 'Alternatives', 'Alternatives, and what would help', '', () => each(why)],
  ['provenance', 'Sources', 'Where the figures come from', '', () => each(provenance)],
];

document.getElementById('top').append(
  h('h1', {}, two ? `${plans[0].name} and ${plans[1].name}` : `${plans[0].model} on ${plans[0].devices}`),
  h('p', { class: 'soft' }, two ? plans.map((plan) => `${plan.name}: ${plan.model} on ${plan.devices}`).join('; ') : 'A plan of autopar. All times and sizes are predictions.'));
document.getElementById('sections').append(h('ul', {}, SECTIONS.map(([id, short]) => h('li', {}, h('a', { href: `#${id}` }, short)))));
document.getElementById('main').append(...SECTIONS.map(([id, , title, intro, make]) => h('section', { id, 'aria-labelledby': `${id}-title` },
  h('h2', { id: `${id}-title` }, title), intro ? h('p', { class: 'soft' }, intro) : null, make())));
started.forEach((start) => start());
document.documentElement.dataset.ready = 'yes';

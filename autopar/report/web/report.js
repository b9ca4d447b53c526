// A report: everything that is known about one plan, or two, as sections of a page.
import { cluster } from './cluster.js';
import { sideBySide } from './compare.js';
import { bar, copyButton, h, lazy, legend, table } from './dom.js';
import { count, percent, plural, seconds, size } from './format.js';
import { memory, peaks } from './memory.js';
import { timeline } from './timeline.js';
import { controls, forget, View } from './view.js';

const USES = [['computation', 'computation'], ['exposed communication', 'exposed'], ['sends between stages', 'send'], ['once a step', 'once'], ['bubble', 'hatch']];
// A strategy as a title: a degree stays beside its name where lines break, and the number of other layers is small.
function strategyTitle(text) {
  const [, strategy, others] = /^(.*?)( \(.*)?$/.exec(text.replace(/ (\d+)/g, '\u00a0$1'));
  return others ? [strategy, h('small', {}, others)] : [strategy];
}
const total = (parts) => Object.values(parts).reduce((a, b) => a + b, 0);

// The strategy, its abbreviations, the plan's figures (with `two` plans those that the comparison doesn't have) and its command line. `more`
// has buttons beside the command's.
function headline(plan, level, more, two) {
  const { prediction: p } = plan;
  const fullest = plan.stages.reduce((a, b) => (total(a.memory) / a.limit_bytes > total(b.memory) / b.limit_bytes ? a : b));
  const card = (name, value, text) => h('div', {}, h('dt', {}, name), h('dd', {}, value, h('small', {}, text)));
  const batch = `${count(plan.global_batch)} in ${plural(plan.microbatches, 'microbatch', 'microbatches')}`;
  return h('div', { class: 'headline' },
    h('p', { class: 'eyebrow' }, two ? `${plan.name}: ` : '', `${plan.model} on ${plan.devices}`),
    h(level, { class: 'strategy', tabindex: -1 }, strategyTitle(plan.parallelism)),
    plan.legend.length ? h('p', { class: 'soft' }, plan.legend.join('; ')) : null,
    plan.deviations.length ? h('p', { class: 'note' }, `Not exact: ${plan.deviations.join(', ')}`) : null,
    h('dl', { class: 'cards' },
      two ? null : card('one step', seconds(p.step_time_s), `global batch ${batch}`),
      card('tokens/s', count(Math.round(p.tokens_per_s_per_device * plan.device_count)), `${count(Math.round(p.tokens_per_s_per_device))} a device`),
      card('MFU', percent(p.mfu), `in ${plan.precision}`),
      two ? null : card('memory', size(total(fullest.memory)), `of ${size(fullest.limit_bytes)} on the fullest device`),
      plan.bound_s ? card('gap', percent(plan.gap, 2), `no plan that was searched takes less than ${seconds(plan.bound_s)}`) : card('gap', '-', 'this plan was given, not searched'),
      card('devices', count(plan.device_count), plan.pipeline > 1 ? `${count(plan.pipeline)} stages of ${count(plan.device_count / plan.pipeline)}` : 'no pipeline')),
    plan.command || more.length ? h('div', { class: 'command' }, plan.command ? h('code', {}, plan.command) : null,
      h('div', { class: 'tools' }, plan.command ? copyButton('command', () => plan.command) : null, more)) : null,
    plan.missing.map((text) => h('p', { class: 'note' }, text)));
}

// What each pin costs; `without(pin)` makes a button that plans without it.
function pins(plan, without) {
  const step = plan.prediction.step_time_s;
  return h('ul', { class: 'pin-costs', 'aria-label': 'What each pin costs' }, plan.pins.map((pin) => {
    const [saved, most] = [1 - pin.step_time_without_s / step, 1 - pin.bound_without_s / step];
    return h('li', {}, h('span', {}, h('b', {}, `${pin.pin}=${pin.value}`),
      saved > 5e-4 ? ` costs ${percent(saved)} of the step: without the pin it takes ${seconds(pin.step_time_without_s)}` : ' costs nothing that the search found',
      most > Math.max(saved, 0) + 5e-4 ? h('span', { class: 'soft' }, `; no plan saves more than ${percent(most)}`) : null), without ? without(pin) : null);
  }));
}

function configuration(plan) {
  if (!plan.configuration) return null;
  const { files, notes: remarks } = plan.configuration;
  return h('div', {}, Object.entries(files).map(([name, text]) => h('div', {}, h('h3', {}, name), h('div', { class: 'tools' }, copyButton(name, () => text)), h('pre', { tabindex: 0, 'aria-label': name }, text))),
    remarks.length ? h('ul', {}, remarks.map((note) => h('li', {}, note))) : null);
}

function notes(plan) {
  return h('div', {},
    plan.explanation ? null : h('p', { class: 'soft' }, 'Alternatives to the plan: ', h('code', {}, 'autopar report PLAN --explain'), ' searches them, which takes minutes.'),
    plan.notes.length ? h('details', {}, h('summary', {}, plural(plan.notes.length, 'note')), h('ul', {}, plan.notes.map((note) => h('li', {}, note)))) : null,
    h('details', {}, h('summary', {}, 'The request, and how the plan was found'),
      table('Options of the command that made the plan', [['option', ''], ['value', 'long']],
        [...Object.entries(plan.request).map(([key, value]) => [key, Array.isArray(value) ? value.join(', ') : `${value}`]),
          ['schedule', plan.schedule], ['stages of each device', `${plan.chunks}`], ['replicas', plan.sync],
          ...(plan.solver ? [['solver', plan.solver]] : []), ...(plan.wall_time_s ? [['planned in', seconds(plan.wall_time_s)]] : [])])));
}

// How the slowest pipeline rank spends a step, and how every other does.
function time(plan) {
  const { prediction: p } = plan;
  const whole = [['computation', p.compute_s, 'computation'], ['exposed communication', p.communication_s, 'exposed'], ['once a step', p.optimizer_s, 'once'], ['bubble', p.bubble_s, 'hatch']];
  const slowest = h('div', { class: 'spent' }, bar(whole.map(([name, value, tone]) => [name, tone, value / p.step_time_s])),
    legend(whole.map(([name, value, tone]) => [name, tone, `${seconds(value)}, ${percent(value / p.step_time_s)}`])));
  if (!plan.step || plan.pipeline === 1) return slowest;
  return h('div', {}, slowest, lazy('Every pipeline rank', () => h('div', {}, legend(USES),
    table('How one device of each pipeline rank spends the step', [['pipeline rank', ''], ['', ''], ...USES.map(([name]) => [name, 'number'])],
      plan.step.time.map((parts, rank) => [`rank ${rank}`, bar(USES.map(([name, tone]) => [name, tone, parts[name] / plan.step.end_s])),
        ...USES.map(([name]) => seconds(parts[name]))])))));
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
  if (!plan.step) return null;
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
  if (!found) return null;
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
  if (!plan.provenance.length) return null;
  const rows = plan.provenance.map((one) => [one.figure, Number(one.value).toLocaleString('en', { maximumSignificantDigits: 4 }), one.unit, one.source]);
  const make = (wanted) => table(`${plural(wanted.length, 'figure')} of ${rows.length}`, [['figure', ''], ['value', 'number'], ['unit', ''], ['source', 'long']], wanted);
  const holder = h('div', {}, make(rows));
  const search = h('input', { type: 'search', on: { input: (event) => {
    const text = event.target.value.toLowerCase();
    holder.replaceChildren(make(rows.filter((row) => row.some((cell) => cell.toLowerCase().includes(text)))));
  } } });
  return h('details', {}, h('summary', {}, `${plural(rows.length, 'figure')} with their sources`), h('label', { class: 'tools' }, 'Search ', search), holder);
}

// Sections are [id, short title, title, introduction, contents by plan]; contents that are null are left out.
const SECTIONS = [
  ['configuration', 'Configuration', 'Configuration of the trainer', 'The plan in the trainer\'s own options.', configuration],
  ['cluster', 'Cluster', 'What each GPU holds', 'A tile is a GPU: its pipeline stage, its rank in each group, and its memory at the peak against its capacity.', cluster],
  ['timeline', 'Timeline', 'One training step', 'Every microbatch on every pipeline rank. Drag to move, pinch or turn the wheel with Ctrl to zoom; with the keyboard, arrows go from action to action, + and − zoom, 0 shows the whole step.',
    (plan, view) => (plan.step ? timeline(plan, view) : null)],
  ['memory', 'Memory', 'Memory over the step', '', (plan, view) => h('div', {}, plan.step ? memory(plan, view) : null, plan.pipeline > 1 || !plan.step ? peaks(plan) : lazy('The peak in figures', () => peaks(plan)))],
  ['time', 'Time', 'Where the time goes', 'On the slowest pipeline rank, whose seconds add up to the step.', time],
  ['layers', 'Layers', 'Stages and layers', '', layers],
  ['communication', 'Communication', 'Communication', 'Per device, the mean of all pipeline ranks. Times are those of the whole exchange, hidden under computation or not.', communication],
  ['why', 'Alternatives', 'Alternatives, and what would help', '', why],
  ['provenance', 'Sources', 'Where the figures come from', '', provenance],
  ['notes', 'Notes', 'Notes and request', '', notes],
];

// The sections of a report. `more` (buttons beside the command) and `without` (a button that plans without a pin) are those of `autopar ui`.
export function report(plans, { level = 'h1', more = [], without = null } = {}) {
  forget();
  const two = plans.length > 1;
  const view = new View(Math.max(...plans.map((plan) => (plan.step ? plan.step.end_s : plan.prediction.step_time_s))));
  const found = SECTIONS.map(([id, short, title, intro, make]) => {
    const parts = plans.map((plan) => [plan, make(plan, view)]).filter(([, part]) => part);
    const named = parts.map(([plan, part]) => (two ? h('div', {}, h('h3', {}, plan.name), part) : part));
    const wide = id === 'timeline' || id === 'memory' || id === 'cluster';
    return [id, short, title, intro, parts.length ? h('div', { class: two && !wide ? 'pair two' : '' }, id === 'timeline' ? controls(view) : null, named) : null];
  }).filter(([, , , , part]) => part);
  if (two) found.unshift(['comparison', 'Side by side', 'Side by side', '', sideBySide(plans, false)]);
  const list = h('nav', { 'aria-label': 'Sections' }, h('ul', {}, found.map(([id, short]) => h('li', {}, h('a', { href: `#${id}` }, short)))));
  return [
    h('div', { class: two ? 'pair two heads' : 'heads' }, plans.map((plan) => h('div', {}, headline(plan, two ? 'h2' : level, more, two), plan.pins.length ? pins(plan, without) : null))),
    list,
    ...found.map(([id, , title, intro, part]) => h('section', { id, 'aria-labelledby': `${id}-title` },
      h('h2', { id: `${id}-title` }, title), intro ? h('p', { class: 'soft' }, intro) : null, part)),
  ];
}

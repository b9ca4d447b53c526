// The form of `autopar ui`: what to plan. Degrees are sliders over the possible divisors; other pins are rows.
import { button, h } from './dom.js';
import { count } from './format.js';

const OWN = 'config.json of your own';
const DEGREES = { data: 'DP data', tensor: 'TP tensor', pipeline: 'PP pipeline', ulysses: 'Ulysses', ring: 'CP ring', expert: 'EP expert' };
const SLIDERS = { ...DEGREES, zero: 'ZeRO', microbatches: 'Microbatches' };
const AUTO = 'auto';
const UNKNOWN = 1024; // devices whose divisors are offered while their number is not known
const REST_MS = 450; // after the last movement of a slider

const find = (id) => document.getElementById(id);
const value = (id) => find(id).value.trim();
const field = (label, control, more = null) => h('div', {}, h('label', { for: control.id }, label), control, more);
const options = (names, chosen) => names.map((name) => h('option', { value: name, selected: name === chosen }, name));
function divisors(n) {
  const found = [];
  for (let i = 1; i * i <= n && i < 1e6; i += 1) if (n % i === 0) found.push(i, ...(i * i < n ? [n / i] : []));
  return found.sort((a, b) => a - b);
}

// The number of devices that a text such as `2x8xH100-80GB`, `8xH100` or `4` describes; null if it is another text.
export function deviceCount(text) {
  const found = text.split('+').map((part) => /^\s*(\d+)(?:x(\d+))?(?:x[A-Za-z].*)?\s*$/.exec(part));
  return found.every(Boolean) ? found.reduce((sum, [, a, b]) => sum + Number(a) * Number(b || 1), 0) : null;
}

// Nodes and GPUs of a node, of a text such as `2x8xH100-80GB`; null if it is another text.
export function shape(text) {
  const found = /^\s*(?:(\d+)x)?(\d+)x[A-Za-z]/.exec(text);
  return found && !text.includes('+') ? [Number(found[1] || 1), Number(found[2])] : null;
}

// `known()` has facts of the plan in sight (device_count, layers, global_batch, and the degrees that it `chose`); `plan(request)` plans.
export class RequestForm {
  constructor(choices, { known, plan, cancel, changed }) {
    Object.assign(this, { choices, known, plan, changed, timer: null });
    this.pins = Object.fromEntries(Object.keys(SLIDERS).map((name) => [name, AUTO]));
    this.others = choices.pins.filter((pin) => !(pin.name in SLIDERS));
    this.element = find('request');
    this.build(cancel);
    this.choose();
  }

  build(cancel) {
    const { choices } = this;
    const models = choices.models.map((model) => h('option', { value: model.name }, `${model.name}${model.parameters ? ` (${count(model.parameters / 1e9)} B)` : ''}`));
    const file = h('input', { id: 'file', type: 'file', accept: '.json,application/json', on: { change: async () => {
      if (!file.files.length) return;
      find('config').value = await file.files[0].text();
      find('config').dataset.name = file.files[0].name.replace(/\.json$/, '');
    } } });
    const first = (choices.devices.find((kind) => kind.name.startsWith('H100')) || choices.devices[0]).name;
    const devices = h('input', { id: 'devices', value: `8x${first}`, list: 'kinds', autocomplete: 'off', spellcheck: 'false', required: true, on: { input: () => this.sync() } });
    const number = (id, attributes = {}) => h('input', { id, type: 'number', min: 1, on: { input: () => this.sync() }, ...attributes });
    this.element.append(
      field('Model', h('select', { id: 'model', on: { change: () => this.choose() } }, models, h('option', { value: OWN }, OWN)),
        h('div', { id: 'own', hidden: true }, field('Upload a transformers config.json', file), field('or paste it', h('textarea', { id: 'config', spellcheck: 'false' })))),
      field('Devices: nodes x GPUs x kind', devices, h('datalist', { id: 'kinds' }, choices.devices.map((kind) => h('option', { value: `8x${kind.name}` })))),
      field('Trainer', h('select', { id: 'trainer' }, h('option', { value: '' }, 'a program that autopar writes'), choices.trainers.map(({ name, title }) => h('option', { value: name }, title)))),
      h('div', { class: 'row' }, field('Global batch', number('global-batch')), field('Tokens', number('seq'))),
      h('fieldset', { id: 'sliders' }, h('legend', {}, 'Pins'), Object.keys(SLIDERS).map((name) => this.slider(name))),
      h('details', {}, h('summary', {}, 'More pins and options'),
        h('div', { id: 'pins' }), h('div', { class: 'tools' }, button('Add a pin', () => {
          const row = this.row();
          find('pins').append(row);
          row.querySelector('select').focus();
        }, { id: 'add-pin' })),
        field('Pins of single layers, with spaces between them', h('input', { id: 'layer-pins', spellcheck: 'false', placeholder: 'layers.0-7.tensor=8' })),
        field('Memory of a device that a plan may fill', h('input', { id: 'memory-limit', placeholder: '70GB' })),
        field('Seconds to search', number('time-limit', { placeholder: '20' })),
        field('Precision', h('select', { id: 'precision' }, options(['', 'bfloat16', 'float16', 'float32', 'float64'], ''))),
        field('Cluster file, in place of the devices above', h('textarea', { id: 'cluster', spellcheck: 'false' }))),
      h('div', { class: 'tools' }, h('button', { class: 'main', id: 'go' }, 'Plan'), button('Cancel', cancel, { id: 'cancel', disabled: true }),
        button('All auto', () => { this.setPins({}); this.replan(); }, { id: 'all-auto', hidden: true })));
    this.element.addEventListener('submit', (event) => { event.preventDefault(); this.submit(); });
  }

  submit(moves = true) {
    clearTimeout(this.timer);
    this.plan(() => this.request(), moves);
  }

  // Plan when the sliders have come to rest.
  replan() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.submit(false), REST_MS);
  }

  // -- sliders --

  slider(name) {
    const pin = this.choices.pins.find((one) => one.name === name);
    return h('div', { class: 'slider' }, h('label', { for: `pin-${name}`, title: pin ? pin.meaning : null }, SLIDERS[name]),
      h('input', { type: 'range', id: `pin-${name}`, min: 0, step: 1, value: 0, on: { input: (event) => {
        this.pins[name] = this.possible(name)[Number(event.target.value)];
        this.sync();
        this.replan();
      } } }), h('output', { for: `pin-${name}` }, AUTO));
  }

  // What a slider offers: `auto`, and the values that the devices, the batch and the other sliders admit.
  possible(name) {
    if (name === 'zero') return [AUTO, 0, 1, 2, 3];
    const known = this.known();
    const pinned = (names) => names.filter((other) => other !== name && this.pins[other] !== AUTO).reduce((product, other) => product * this.pins[other], 1);
    const model = this.model();
    if (name === 'microbatches') {
      const batch = Number(value('global-batch')) || (model && model.global_batch) || known.global_batch || UNKNOWN;
      const rows = batch / pinned(['data']);
      return [AUTO, ...(Number.isInteger(rows) ? divisors(rows) : [1])];
    }
    const devices = (value('cluster') ? null : deviceCount(value('devices'))) || known.device_count || UNKNOWN;
    if (name === 'expert') return [AUTO, ...divisors(devices)]; // experts may be folded over the axes of other degrees
    const left = devices / pinned(Object.keys(DEGREES).filter((other) => other !== 'expert'));
    const most = name === 'pipeline' && known.layers ? known.layers : left;
    return [AUTO, ...(Number.isInteger(left) ? divisors(left).filter((n) => n <= most) : [1])];
  }

  // Bring all sliders in line with the request; a pin that has become impossible is `auto` again.
  sync() {
    for (const name of Object.keys(SLIDERS)) {
      const offered = this.possible(name);
      if (!offered.includes(this.pins[name])) this.pins[name] = AUTO;
      const input = find(`pin-${name}`);
      input.max = offered.length - 1;
      input.value = offered.indexOf(this.pins[name]);
      input.setAttribute('aria-valuetext', this.pins[name]);
      input.style.setProperty('--filled', `${100 * input.value / Math.max(1, input.max)}%`);
      input.classList.toggle('pinned', this.pins[name] !== AUTO);
      const [pinned, chosen] = [this.pins[name] !== AUTO, (this.known().chose || {})[name]];
      input.nextElementSibling.replaceChildren(...(pinned || chosen === undefined ? [`${this.pins[name]}`] : [`${AUTO} `, h('b', {}, `${chosen}`)]));
    }
    this.changed();
    find('all-auto').hidden = Object.values(this.pins).every((one) => one === AUTO);
  }

  // -- other pins --

  names() { return [...document.querySelectorAll('.pin-name')].map((select) => select.value); }

  // A row with a pin that no other row has, unless its name is given.
  row(name = null, given = '') {
    const used = this.names();
    const unused = (this.others.find((pin) => !used.includes(pin.name)) || this.others[0]).name;
    const holder = h('div', {});
    const select = h('select', { 'aria-label': 'Pin', class: 'pin-name' }, options(this.others.map((pin) => pin.name), name || unused));
    const control = (pin, now) => (pin.values.length
      ? h('select', { 'aria-label': `Value of ${pin.name}`, class: 'pin-value' }, options(pin.values, now || pin.values[0]))
      : h('input', { type: 'number', min: pin.least, max: pin.most, value: now || Math.max(pin.least, 1), 'aria-label': `Value of ${pin.name}`, class: 'pin-value' }));
    const row = h('div', { class: 'row pin' }, select, holder, button('✕', () => { row.remove(); find('add-pin').focus(); }, { 'aria-label': 'Remove this pin' }));
    const change = (now) => {
      const pin = this.others.find((one) => one.name === select.value);
      select.title = pin.meaning;
      holder.replaceChildren(control(pin, now));
    };
    select.addEventListener('change', () => change(''));
    change(given);
    return row;
  }

  setPins(pins) {
    for (const name of Object.keys(SLIDERS)) this.pins[name] = name in pins ? Number(pins[name]) : AUTO;
    find('pins').replaceChildren(...Object.entries(pins).filter(([name]) => !(name in SLIDERS)).map(([name, given]) => this.row(name, `${given}`)));
    this.sync();
  }

  // -- the request --

  model() { return this.choices.models.find((one) => one.name === value('model')); }

  choose() {
    const model = this.model();
    find('own').hidden = Boolean(model);
    for (const [id, key] of [['global-batch', 'global_batch'], ['seq', 'seq']]) find(id).placeholder = (model && model[key]) || 'its own';
    const dense = model && model.parameters && model.kind !== 'mixture of experts';
    find('pin-expert').parentElement.hidden = Boolean(dense);
    if (dense) this.pins.expert = AUTO;
    this.sync();
  }

  set(fields) {
    for (const [id, text] of Object.entries(fields)) find(id).value = text;
    this.choose();
  }

  request() {
    const names = this.names();
    const twice = names.find((name, i) => names.indexOf(name) < i);
    if (twice) throw Object.assign(new Error(`the pin ${twice} is given twice`), { hint: 'remove one of them' });
    const pins = Object.fromEntries(Object.entries(this.pins).filter(([, one]) => one !== AUTO));
    for (const row of document.querySelectorAll('.pin')) pins[row.querySelector('.pin-name').value] = row.querySelector('.pin-value').value;
    const asked = { pins, options: {}, pin: value('layer-pins').split(/\s+/).filter(Boolean) };
    if (value('model') === OWN) Object.assign(asked, { config: value('config'), name: find('config').dataset.name });
    else asked.model = value('model');
    if (value('cluster')) asked.cluster = value('cluster');
    else asked.devices = value('devices');
    for (const id of ['global-batch', 'seq', 'memory-limit', 'time-limit', 'precision', 'trainer']) if (value(id)) asked.options[id] = value(id);
    return asked;
  }
}

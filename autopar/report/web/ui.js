// The script of the page that `autopar ui` serves: what to plan on one side, plans on the other. Everything it knows comes from its server.
import { h, say, table } from './dom.js';
import { count, percent, seconds, size } from './format.js';

const OWN = 'config.json of your own';
const FILE = 'cluster file';
const plans = []; // jobs that are done, the newest last
let choices;
let shown = null; // the plan in sight
let running = null; // the job that runs

async function ask(path, method = 'GET', body = undefined) {
  const answer = await fetch(path, { method, headers: body === undefined ? {} : { 'Content-Type': 'application/json' }, body: body === undefined ? undefined : JSON.stringify(body) });
  const found = await answer.json();
  if (!answer.ok) throw Object.assign(new Error(found.error), { hint: found.hint });
  return found;
}

const form = document.getElementById('request');
const result = document.getElementById('result');
const parts = { progress: h('section', { 'aria-label': 'Progress', hidden: true }), wrong: h('div', { role: 'alert' }), plans: h('section', { 'aria-label': 'Plans', hidden: true }), plan: h('section', { 'aria-label': 'The plan', hidden: true }) };
const field = (label, control, more = null) => h('div', {}, h('label', { for: control.id }, label), control, more);
const options = (names, chosen) => names.map((name) => h('option', { value: name, selected: name === chosen }, name));
const value = (id) => document.getElementById(id).value.trim();

// -- what to plan --

const pinNames = () => [...document.querySelectorAll('.pin-name')].map((select) => select.value);

function unusedPin() {
  const used = pinNames();
  return (choices.pins.find((pin) => !used.includes(pin.name)) || choices.pins[0]).name;
}

// A row with a pin that no other row has, unless its name is given.
function pinRow(name = unusedPin(), given = '') {
  const holder = h('div', {});
  const select = h('select', { 'aria-label': 'Pin', class: 'pin-name' }, options(choices.pins.map((pin) => pin.name), name));
  const control = (pin, now) => (pin.values.length
    ? h('select', { 'aria-label': `Value of ${pin.name}`, class: 'pin-value' }, options(pin.values, now || pin.values[0]))
    : h('input', { type: 'number', min: pin.least, max: pin.most, value: now || Math.max(pin.least, 1), 'aria-label': `Value of ${pin.name}`, class: 'pin-value' }));
  const row = h('div', { class: 'row pin' }, select, holder, h('button', { type: 'button', 'aria-label': 'Remove this pin', on: { click: () => { row.remove(); document.getElementById('add-pin').focus(); } } }, '✕'));
  const change = (now) => {
    const pin = choices.pins.find((one) => one.name === select.value);
    select.title = pin.meaning;
    holder.replaceChildren(control(pin, now));
  };
  select.addEventListener('change', () => change(''));
  change(given);
  return row;
}

function setPins(pins) {
  document.getElementById('pins').replaceChildren(...Object.entries(pins).map(([name, given]) => pinRow(name, `${given}`)));
}

function build() {
  const models = choices.models.map((model) => h('option', { value: model.name }, `${model.name}${model.parameters ? ` (${count(model.parameters / 1e9)} B)` : ''}`));
  const model = h('select', { id: 'model', on: { change: choose } }, models, h('option', { value: OWN }, OWN));
  const file = h('input', { id: 'file', type: 'file', accept: '.json,application/json', on: { change: async () => {
    if (!file.files.length) return;
    document.getElementById('config').value = await file.files[0].text();
    document.getElementById('config').dataset.name = file.files[0].name.replace(/\.json$/, '');
  } } });
  const devices = h('input', { id: 'devices', value: `8x${(choices.devices.find((kind) => kind.name.startsWith('H100')) || choices.devices[0]).name}`, list: 'kinds', autocomplete: 'off', spellcheck: 'false', required: true });
  const own = h('div', { id: 'own', hidden: true }, field('Upload a transformers config.json', file), field('or paste it', h('textarea', { id: 'config', spellcheck: 'false' })));
  form.append(
    h('fieldset', {}, h('legend', {}, 'Model'), field('Which model', model), own),
    h('fieldset', {}, h('legend', {}, 'Devices'),
      field('nodes x GPUs x kind, or a number of processes here', devices, h('datalist', { id: 'kinds' }, choices.devices.map((kind) => h('option', { value: `8x${kind.name}` })))),
      h('details', {}, h('summary', {}, FILE), field('in place of the line above', h('textarea', { id: 'cluster', spellcheck: 'false' })))),
    h('fieldset', {}, h('legend', {}, 'Batch'), h('div', { class: 'row' },
      field('Global batch', h('input', { id: 'global-batch', type: 'number', min: 1 })), field('Tokens', h('input', { id: 'seq', type: 'number', min: 1 })))),
    h('fieldset', {}, h('legend', {}, 'Pins'), h('div', { id: 'pins' }),
      h('div', { class: 'tools' }, h('button', { type: 'button', id: 'add-pin', on: { click: () => {
        const row = pinRow();
        document.getElementById('pins').append(row);
        row.querySelector('select').focus();
      } } }, 'Add a pin')),
      h('details', {}, h('summary', {}, 'More'),
        field('Pins of single layers, with spaces between them', h('input', { id: 'layer-pins', spellcheck: 'false', placeholder: 'layers.0-7.tensor=8' })),
        field('Memory of a device that a plan may fill', h('input', { id: 'memory-limit', placeholder: '70GB' })),
        field('Seconds to search', h('input', { id: 'time-limit', type: 'number', min: 1, placeholder: '20' })),
        field('Precision', h('select', { id: 'precision' }, options(['', 'bfloat16', 'float16', 'float32', 'float64'], ''))))),
    h('div', { class: 'tools' }, h('button', { class: 'main', id: 'go' }, 'Plan'), h('button', { type: 'button', id: 'cancel', disabled: true, on: { click: cancel } }, 'Cancel')));
  form.addEventListener('submit', (event) => { event.preventDefault(); try { plan(request()); } catch (error) { wrong(error); } });
  result.append(parts.wrong, parts.progress, parts.plans, parts.plan);
  choose();
}

function choose() {
  const model = choices.models.find((one) => one.name === value('model'));
  document.getElementById('own').hidden = Boolean(model);
  for (const [id, key] of [['global-batch', 'global_batch'], ['seq', 'seq']]) document.getElementById(id).placeholder = (model && model[key]) || 'its own';
}

function request() {
  const names = pinNames();
  const twice = names.find((name, i) => names.indexOf(name) < i);
  if (twice) throw Object.assign(new Error(`the pin ${twice} is given twice`), { hint: 'remove one of them' });
  const pins = Object.fromEntries([...document.querySelectorAll('.pin')].map((row) => [row.querySelector('.pin-name').value, row.querySelector('.pin-value').value]));
  const own = value('model') === OWN;
  const asked = { pins, options: {}, pin: value('layer-pins').split(/\s+/).filter(Boolean) };
  if (own) Object.assign(asked, { config: value('config'), name: document.getElementById('config').dataset.name });
  else asked.model = value('model');
  if (value('cluster')) asked.cluster = value('cluster');
  else asked.devices = value('devices');
  for (const id of ['global-batch', 'seq', 'memory-limit', 'time-limit', 'precision']) if (value(id)) asked.options[id] = value(id);
  return asked;
}

// -- jobs --

function wrong(error) {
  if (!error) { parts.wrong.replaceChildren(); return; }
  parts.wrong.replaceChildren(h('section', {}, h('div', { class: 'wrong' }, h('p', {}, h('b', {}, 'Error: '), error.message), error.hint ? h('p', {}, h('b', {}, 'Hint: '), error.hint) : null,
    (error.changes || []).length ? h('div', {}, h('p', {}, 'What would fit:'), h('ul', {}, error.changes.map((text) => h('li', {}, text)))) : null)));
}

function progress(job, title) {
  parts.progress.hidden = false;
  const last = job.stages[job.stages.length - 1];
  parts.progress.replaceChildren(h('h2', {}, title),
    h('ol', { class: 'stages' }, job.stages.map((one) => h('li', { 'aria-current': one === last ? 'step' : null }, one.stage))),
    h('p', { class: 'soft' }, `${last ? last.text : job.state} ${job.seconds ? `(${job.seconds.toFixed(0)} s)` : ''}`));
  if (last && say.last !== last.stage) { say.last = last.stage; say(`${title}: ${last.stage}`); }
}

const pause = (ms) => new Promise((go) => { setTimeout(go, ms); });

// The job when it has ended; null where it failed or was cancelled, which the page then says.
async function follow(path, body, title) {
  wrong(null);
  const button = document.activeElement;
  document.getElementById('go').disabled = true;
  try {
    running = await ask(path, 'POST', body);
    document.getElementById('cancel').disabled = false;
    while (running.state === 'waiting' || running.state === 'running') {
      progress(running, title);
      await pause(250);
      running = await ask(`api/plans/${running.id}`);
    }
    if (running.state === 'done') return running;
    if (running.state === 'cancelled') say('cancelled');
    else wrong(running.error);
  } catch (error) {
    wrong(error);
  } finally {
    running = null;
    parts.progress.hidden = true;
    document.getElementById('go').disabled = false;
    document.getElementById('cancel').disabled = true;
    if (button && button.isConnected) button.focus();
  }
  return null;
}

async function cancel() {
  if (running) await ask(`api/plans/${running.id}`, 'DELETE').catch(wrong);
}

async function plan(asked) {
  const job = await follow('api/plans', asked, 'Planning');
  if (!job) return;
  plans.push({ ...job, asked });
  show(plans[plans.length - 1]);
}

// -- plans --

const words = (pins) => Object.entries(pins).map(([name, given]) => `${name}=${given}`).join(' ');
const slower = (share) => (Math.abs(share) < 5e-4 ? 'as fast' : `${percent(Math.abs(share))} ${share > 0 ? 'slower' : 'faster'}`);

function list() {
  parts.plans.hidden = plans.length < 2;
  const now = shown.plan.step_time_s / shown.plan.global_batch;
  parts.plans.replaceChildren(h('h2', {}, 'Plans so far'), table('Step times, and how they compare with the plan in sight', [['plan', ''], ['step', 'number'], ['compared', 'number'], ['pins', 'long'], ['batch', 'number'], ['devices', '']],
    plans.map((one, i) => [
      h('button', { type: 'button', 'aria-current': one === shown ? 'true' : null, on: { click: () => show(one) } }, `${i + 1}: ${one.plan.model}`),
      seconds(one.plan.step_time_s), one === shown ? 'in sight' : one.plan.model === shown.plan.model ? slower(one.plan.step_time_s / one.plan.global_batch / now - 1) : '-',
      words(one.asked.pins) + (one.asked.pin.length ? ` ${one.asked.pin.join(' ')}` : '') || '-', count(one.plan.global_batch), one.plan.devices])));
}

function show(one) {
  shown = one;
  const { plan: found } = one;
  const card = (name, text) => h('div', {}, h('dt', {}, name), h('dd', {}, text));
  const most = Math.max(...found.stages.map((stage) => stage.memory_bytes));
  parts.plan.hidden = false;
  parts.plan.replaceChildren(h('h2', { tabindex: -1, id: 'title' }, `${found.model} on ${found.devices}`),
    h('dl', { class: 'cards' }, card('one step', seconds(found.step_time_s)), card('tokens/s a device', count(Math.round(found.tokens_per_s_per_device))),
      card('MFU', percent(found.mfu)), card('memory', size(most)), card('gap', found.bound_s ? percent(found.gap, 2) : '-')),
    ...pinPrices(one), h('p', {}, h('small', {}, 'The same on the command line: '), h('code', {}, one.command)), tabs(one));
  list();
  say(`plan: one step takes ${seconds(found.step_time_s)}, MFU ${percent(found.mfu)}`);
}

function pinPrices(one) {
  const { pins, step_time_s: step } = one.plan;
  if (!pins.length) return [];
  const without = (key) => {
    const asked = { ...one.asked, pins: { ...one.asked.pins }, pin: one.asked.pin.filter((text) => !text.startsWith(`${key}=`)) };
    delete asked.pins[key];
    return asked;
  };
  return [table('What each pin costs', [['pin', ''], ['it costs', 'number'], ['best step without', 'number'], ['', '']], pins.map((pin) => [
    `${pin.pin}=${pin.value}`, percent(Math.max(0, 1 - pin.step_time_without_s / step)), seconds(pin.step_time_without_s),
    h('button', { type: 'button', on: { click: () => { setPins(without(pin.pin).pins); plan(without(pin.pin)); } } }, `Plan without ${pin.pin}`)]))];
}

function tabs(one) {
  const panels = {
    Report: () => h('iframe', { src: `api/plans/${one.id}/report`, title: 'Report of the plan', sandbox: 'allow-scripts' }),
    Program: () => program(one),
    JSON: () => h('div', {}, h('p', {}, h('a', { href: `api/plans/${one.id}/plan.json`, download: 'plan.json' }, 'plan.json'), ', as autopar plan --json prints it'), h('pre', { tabindex: 0, 'aria-label': 'The plan as JSON' }, JSON.stringify(one.plan, null, 1))),
  };
  const panel = h('div', { role: 'tabpanel', id: 'panel', 'aria-labelledby': 'tab-Report' });
  const names = Object.keys(panels);
  const buttons = names.map((name) => h('button', { type: 'button', role: 'tab', id: `tab-${name}`, 'aria-controls': 'panel', on: { click: () => open(name) } }, name));
  const open = (name) => {
    buttons.forEach((button, i) => { button.setAttribute('aria-selected', `${names[i] === name}`); button.tabIndex = names[i] === name ? 0 : -1; });
    panel.setAttribute('aria-labelledby', `tab-${name}`);
    panel.replaceChildren(panels[name]());
  };
  const bar = h('div', { role: 'tablist', 'aria-label': 'Views of the plan', on: { keydown: (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const next = (buttons.indexOf(document.activeElement) + step + names.length) % names.length;
    open(names[next]);
    buttons[next].focus();
  } } }, buttons);
  open('Report');
  return h('div', {}, bar, panel);
}

function program(one) {
  const holder = h('div', {});
  const files = (job) => {
    const text = h('pre', { tabindex: 0, 'aria-label': 'The file' });
    const buttons = job.files.map(({ name, bytes }) => h('li', {}, h('button', { type: 'button', on: { click: async (event) => {
      buttons.forEach((item) => item.firstChild.removeAttribute('aria-current'));
      event.target.setAttribute('aria-current', 'true');
      const answer = await fetch(`api/plans/${job.id}/program/${name.split('/').map(encodeURIComponent).join('/')}`);
      text.setAttribute('aria-label', name);
      text.textContent = await answer.text();
    } } }, name, h('small', {}, ` ${size(bytes)}`))));
    holder.replaceChildren(h('div', { class: 'files' }, h('ul', { 'aria-label': 'Files of the program' }, buttons), text));
    buttons[0].firstChild.click();
  };
  if (one.program) files(one.program);
  else {
    holder.append(h('p', {}, 'The program is a folder of Python: one module for each kind of layer, and train.py.'), h('button', { type: 'button', class: 'main', on: { click: async () => {
      const job = await follow(`api/plans/${one.id}/program`, {}, 'Writing the program');
      if (job) { one.program = job; files(job); say(`the program has ${job.files.length} files`); }
    } } }, 'Write the program'));
  }
  return holder;
}

ask('api/choices').then((found) => { choices = found; build(); document.documentElement.dataset.ready = 'yes'; }).catch((error) => { result.append(parts.wrong); wrong(error); });

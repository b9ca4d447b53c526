// The script of the page that `autopar ui` serves: what to plan on one side, the plan on the other. Everything it knows comes from its server;
// `autopar` (report.js of this server, the script of `autopar report`) draws plans.
import { button, copyButton, h, say } from './dom.js';
import { count, percent, plural, seconds, size } from './format.js';
import { RequestForm, shape } from './request.js';

const { drawAll, report, sideBySide } = globalThis.autopar;
const EXAMPLES = [['llama3-8b', '2x8xH100-80GB', 128], ['llama3-70b', '32x8xH100-80GB', 1024], ['mixtral-8x7b', '16x8xH100-80GB', 1024]];
const plans = []; // jobs that are done, the newest last, with their requests and figures
let form;
let shown = null; // the plan that is shown
let other = null; // the plan that it is compared with
let view = 'Report'; // the open tab
let running = null; // the job that runs
let turn = 0; // counts jobs: a newer one ends the older

const find = (id) => document.getElementById(id);
const number = (one) => plans.indexOf(one) + 1;

async function ask(path, method = 'GET', body = undefined) {
  const answer = await fetch(path, { method, headers: body === undefined ? {} : { 'Content-Type': 'application/json' }, body: body === undefined ? undefined : JSON.stringify(body) });
  const found = await answer.json();
  if (!answer.ok) throw Object.assign(new Error(found.error), { hint: found.hint });
  return found;
}

// -- jobs --

function wrong(error) {
  find('wrong').replaceChildren(...(error ? [h('section', { class: 'wrong' }, h('p', {}, h('b', {}, 'Error: '), error.message), error.hint ? h('p', {}, h('b', {}, 'Hint: '), error.hint) : null,
    (error.changes || []).length ? h('div', {}, h('p', {}, 'What would fit:'), h('ul', {}, error.changes.map((text) => h('li', {}, text)))) : null)] : []));
}

function progress(job, title) {
  const last = job.stages[job.stages.length - 1];
  find('progress').replaceChildren(h('p', {}, h('b', {}, title), h('span', { class: 'soft' }, job.seconds ? ` ${job.seconds.toFixed(0)} s` : '')),
    h('ol', { class: 'stages' }, job.stages.map((one) => h('li', { 'aria-current': one === last ? 'step' : null }, one.stage))),
    h('p', { class: 'soft' }, last ? last.text : job.state));
  if (last && say.last !== last.stage) { say.last = last.stage; say(`${title}: ${last.stage}`); }
}

const pause = (ms) => new Promise((go) => { setTimeout(go, ms); });

function busy(is) {
  find('go').disabled = is;
  find('cancel').disabled = !is;
  find('result').setAttribute('aria-busy', is);
  if (!is) find('progress').replaceChildren(h('p', { class: 'soft' }, 'Moving a slider plans again: the pinned degrees are kept, the others are searched.'));
}

// The job when it has ended; null where it failed or was cancelled, which the page then says, or where a newer one took its place.
async function follow(path, body, title) {
  turn += 1;
  const mine = turn;
  wrong(null);
  const focused = document.activeElement;
  if (running) await cancel();
  busy(true);
  try {
    let job = await ask(path, 'POST', body);
    if (mine === turn) running = job; else await ask(`api/plans/${job.id}`, 'DELETE');
    while (mine === turn && (job.state === 'waiting' || job.state === 'running')) {
      progress(job, title);
      await pause(200);
      job = await ask(`api/plans/${job.id}`);
    }
    if (mine !== turn) return null;
    if (job.state === 'done') return job;
    if (job.state === 'cancelled') say('cancelled');
    else wrong(job.error);
  } catch (error) {
    if (mine === turn) wrong(error);
  } finally {
    if (mine === turn) {
      running = null;
      busy(false);
      if (focused && focused.isConnected && document.activeElement === document.body) focused.focus(); // a button that was disabled lost it
    }
  }
  return null;
}

async function cancel() {
  if (running) await ask(`api/plans/${running.id}`, 'DELETE').catch(wrong);
}

// Plan what `request()` returns; on narrow screens the plan moves into sight if it `moves`.
async function plan(request, moves = false) {
  try {
    const asked = request();
    const job = await follow('api/plans', asked, 'Planning');
    if (!job) return;
    const figures = await ask(`api/plans/${job.id}/figures`);
    plans.push({ ...job, asked, figures: Object.assign(figures, { name: `plan ${plans.length + 1}` }) });
    if (plans.length > 1) other = other && view === 'Compare' ? other : shown;
    show(plans[plans.length - 1]);
    form.sync();
    if (moves && innerWidth < 900) find('result').scrollIntoView();
  } catch (error) {
    wrong(error);
  }
}

// -- plans --

const perSequence = (one) => one.plan.step_time_s / one.plan.global_batch;
const slower = (share) => (Math.abs(share) < 5e-4 ? 'as fast' : `${percent(Math.abs(share))} ${share > 0 ? 'slower' : 'faster'}`);

function compared(one) {
  if (one === shown) return h('span', { class: 'compared soft' }, 'shown');
  const share = perSequence(one) / perSequence(shown) - 1;
  return one.plan.model === shown.plan.model ? h('span', { class: `compared ${share > 5e-4 ? 'worse' : share < -5e-4 ? 'better' : 'soft'}` }, slower(share)) : '';
}

function list() {
  find('plans').hidden = plans.length < 2;
  find('plans').replaceChildren(h('h2', {}, 'Plans so far'), h('ol', {}, plans.map((one) => h('li', { 'aria-current': one === shown ? 'true' : null },
    h('button', { type: 'button', class: 'pick', on: { click: () => show(one) } },
      h('span', { class: 'soft' }, `plan ${number(one)}`), h('b', {}, seconds(one.plan.step_time_s)), compared(one),
      h('small', {}, one.plan.model === shown.plan.model && one.plan.devices === shown.plan.devices ? '' : `${one.plan.model} on ${one.plan.devices}: `, one.figures.parallelism)),
    one === shown ? null : button('⇄', () => { other = one; view = 'Compare'; show(shown); find('panel').scrollIntoView({ block: 'nearest' }); }, { 'aria-label': `Compare plan ${number(one)} with the plan that is shown`, title: 'Compare with the plan that is shown' })))));
}

function show(one) {
  shown = one;
  if (other === shown) other = plans.findLast((two) => two !== shown) || null;
  const without = (pin) => button(`Plan without ${pin.pin}`, () => {
    const pins = { ...one.asked.pins };
    delete pins[pin.pin];
    form.setPins(pins);
    plan(() => ({ ...one.asked, pins, pin: one.asked.pin.filter((text) => !text.startsWith(`${pin.pin}=`)) }));
  });
  const more = [copyButton('JSON', () => JSON.stringify(one.plan, null, 1)), h('a', { href: `api/plans/${one.id}/report`, download: 'report.html' }, 'Save report')];
  const [heads, ...sections] = report([one.figures], { more, without });
  find('plan').replaceChildren(heads, ...tabs(one, sections));
  drawAll();
  list();
  say(`plan: one step takes ${seconds(one.plan.step_time_s)}, MFU ${percent(one.plan.mfu)}`);
}

function compare(one) {
  const others = plans.filter((two) => two !== one);
  if (!others.length) return h('section', {}, h('p', {}, 'There is one plan so far. Move a slider or change the request, and compare the two plans here.'));
  const holder = h('div', {});
  const choose = () => holder.replaceChildren(sideBySide([other.figures, one.figures]));
  const select = h('select', { id: 'compare-with', on: { change: () => { other = plans[Number(select.value)]; choose(); } } },
    others.map((two) => h('option', { value: plans.indexOf(two), selected: two === other }, `plan ${number(two)}: ${two.figures.parallelism}`)));
  other = other || others[others.length - 1];
  choose();
  return h('section', {}, h('label', { class: 'tools', for: 'compare-with' }, 'Compared with ', select), holder);
}

function tabs(one, sections) {
  const panels = {
    Report: () => sections,
    Compare: () => [compare(one)],
    Program: () => [h('section', {}, program(one))],
    JSON: () => [h('section', {}, h('p', {}, h('a', { href: `api/plans/${one.id}/plan.json`, download: 'plan.json' }, 'plan.json'), ', as autopar plan --json prints it'), h('pre', { tabindex: 0, 'aria-label': 'The plan as JSON' }, JSON.stringify(one.plan, null, 1)))],
  };
  const panel = h('div', { role: 'tabpanel', id: 'panel', 'aria-labelledby': 'tab-Report' });
  if (one.figures.configuration) delete panels.Program; // the trainer runs the plan
  const names = Object.keys(panels);
  const open = (name) => {
    view = name;
    buttons.forEach((tab, i) => { tab.setAttribute('aria-selected', `${names[i] === name}`); tab.tabIndex = names[i] === name ? 0 : -1; });
    panel.setAttribute('aria-labelledby', `tab-${name}`);
    panel.replaceChildren(...panels[name]());
  };
  const buttons = names.map((name) => button(name, () => open(name), { role: 'tab', id: `tab-${name}`, 'aria-controls': 'panel' }));
  const bar = h('div', { role: 'tablist', 'aria-label': 'Views of the plan', on: { keydown: (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const next = (buttons.indexOf(document.activeElement) + step + names.length) % names.length;
    open(names[next]);
    buttons[next].focus();
  } } }, buttons);
  open(view in panels ? view : 'Report');
  return [bar, panel];
}

function program(one) {
  const holder = h('div', {});
  const files = (job) => {
    const text = h('pre', { tabindex: 0, 'aria-label': 'The file' });
    const buttons = job.files.map(({ name, bytes }) => h('li', {}, h('button', { type: 'button', on: { click: async (event) => {
      buttons.forEach((item) => item.firstChild.removeAttribute('aria-current'));
      event.currentTarget.setAttribute('aria-current', 'true');
      const answer = await fetch(`api/plans/${job.id}/program/${name.split('/').map(encodeURIComponent).join('/')}`);
      text.setAttribute('aria-label', name);
      text.textContent = await answer.text();
    } } }, name, h('small', {}, ` ${size(bytes)}`))));
    holder.replaceChildren(h('div', { class: 'files' }, h('ul', { 'aria-label': 'Files of the program' }, buttons),
      h('div', {}, h('div', { class: 'tools' }, copyButton('file', () => text.textContent)), text)));
    buttons[0].firstChild.click();
  };
  if (one.program) files(one.program);
  else {
    holder.append(h('p', {}, 'The program is a folder of Python: one module for each kind of layer, and train.py.'), button('Write the program', async () => {
      const job = await follow(`api/plans/${one.id}/program`, {}, 'Writing the program');
      if (job) { one.program = job; files(job); say(`the program has ${job.files.length} files`); }
    }, { class: 'main' }));
  }
  return holder;
}

// What is in sight before the first plan: examples, and the devices of the request.
function welcome(choices) {
  const offered = EXAMPLES.filter(([model]) => choices.models.some((one) => one.name === model));
  return h('section', { class: 'welcome' }, h('h1', {}, 'Plan a training run'),
    h('p', {}, 'Choose a model and the devices. autopar searches data, tensor, pipeline, context and expert parallelism, ZeRO and recomputation together, '
      + 'and shows the fastest plan that fits: what each GPU holds, the step as a timeline, memory over the step, and the program. Pin a degree with a slider, and the rest is planned around it.'),
    h('div', { class: 'examples' }, offered.map(([model, devices, batch]) => button([h('b', {}, model), ` on ${devices}`, h('small', {}, `batch ${count(batch)}`)], () => {
      form.set({ model, devices, 'global-batch': batch });
      form.submit();
    }))),
    h('div', { id: 'devices-drawn' }));
}

const DRAWN = 48; // nodes of the request's devices that are drawn

function drawDevices() {
  const holder = find('devices-drawn');
  const found = holder && shape(find('devices').value);
  if (!holder) return;
  holder.replaceChildren(...(found && found[0] * found[1] ? [
    h('h2', {}, `${plural(found[0], 'node')} of ${plural(found[1], 'GPU')}`),
    h('div', { class: 'racks' }, Array.from({ length: Math.min(DRAWN, found[0]) }, () => h('div', { class: 'rack' }, Array.from({ length: Math.min(found[1], 72) }, () => h('span')))),
      found[0] > DRAWN ? h('p', { class: 'soft' }, `and ${plural(found[0] - DRAWN, 'more node')}`) : null)] : []));
}

// What the form may know of the plan in sight.
function known() {
  if (!shown || shown.asked.model !== find('model').value) return {};
  const { figures, plan: { global_batch: batch } } = shown;
  return { device_count: figures.device_count, layers: figures.layers.length, global_batch: batch,
    chose: { ...figures.ranks.degrees, pipeline: figures.pipeline, zero: figures.ranks.zero, microbatches: figures.microbatches } };
}

ask('api/choices').then((choices) => {
  form = new RequestForm(choices, { known, plan, cancel, changed: drawDevices });
  find('plan').append(welcome(choices));
  drawDevices();
  busy(false);
  document.documentElement.dataset.ready = 'yes';
}).catch(wrong);

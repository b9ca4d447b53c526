// The pipeline timeline: every action of every pipeline rank, with the sends at their ends and the bubbles between them.
import { colour, h, lazy, legend, say, table, tip } from './dom.js';
import { count, percent, seconds, size } from './format.js';
import { gutter, interact, redraw, RIGHT, scale } from './view.js';

const WORDS = { F: 'forward', B: 'backward', I: 'backward, gradients of inputs', W: 'backward, gradients of weights', O: 'once a step', idle: 'bubble' };
const COLOURS = { F: 'forward', B: 'backward', I: 'backward', W: 'weight', O: 'once', idle: 'bubble' };
const PAGE = 200; // rows of the table of actions at a time
const TOP = 22; // pixels above the rows: the times

// All actions and bubbles in one list; `first[row]` is where a rank's begin.
function actionsOf(step) {
  const items = [];
  const first = [];
  step.ranks.forEach((rank, row) => {
    first.push(items.length);
    let before = 0;
    rank.starts_us.forEach((microseconds, i) => {
      const [kind, stage, microbatch] = [step.kinds[rank.actions[3 * i]], rank.actions[3 * i + 1], rank.actions[3 * i + 2]];
      const start = microseconds / 1e6;
      const stop = start + (kind === 'O' ? rank.once_s : step.durations[kind + stage]);
      if (start - before > 1e-6) items.push({ row, rank, kind: 'idle', stage, microbatch, start: before, stop: start });
      const [to, sendS, bytes] = step.sends[kind + stage] || [null, 0, 0];
      const memory = rank.levels[rank.memory[i]];
      items.push({ row, rank, kind, stage, microbatch, start, stop, to, sendS, bytes, memory: memory.reduce((a, b) => a + b, 0) });
      before = stop;
    });
    if (step.end_s - before > 1e-6 && rank.starts_us.length && !step.left_out.includes('the first')) {
      items.push({ row, rank, kind: 'idle', start: before, stop: step.end_s });
    }
  });
  return { items, first };
}

export function title(item) {
  if (item.kind === 'idle' || item.kind === 'O') return WORDS[item.kind];
  return `${WORDS[item.kind]} of stage ${item.stage}, microbatch ${item.microbatch}`;
}

function facts(item) {
  const found = [
    `pipeline rank ${item.rank.rank} (devices ${item.rank.devices[0]} to ${item.rank.devices[0] + item.rank.devices[1] - 1})`,
    `${seconds(item.stop - item.start)}, from ${seconds(item.start)} to ${seconds(item.stop)}`,
  ];
  if (item.sendS) found.push(`ends with a send to stage ${item.to}: ${size(item.bytes)} a device in ${seconds(item.sendS)}`);
  if (item.memory) found.push(`memory ${size(item.memory)} of ${size(item.rank.limit_bytes)}`);
  return found;
}

// The index of the last item of a row that starts at `time` or before.
function find(items, from, to, time) {
  let [low, high] = [from, to - 1];
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (items[middle].start <= time) low = middle; else high = middle - 1;
  }
  return low;
}

export function timeline(plan, view) {
  const { step } = plan;
  const { items, first } = actionsOf(step);
  const rows = step.ranks.length;
  const last = (row) => (row + 1 < rows ? first[row + 1] : items.length);
  const own = plan.stages.map((stage, s) => plan.stages.slice(0, s).filter((other) => other.rank === stage.rank).length);
  const tall = Math.max(13, Math.min(30, 420 / rows));
  const canvas = h('canvas', { style: { height: `${TOP + Math.ceil(rows * tall)}px` } });
  const box = h('div', {
    class: 'chart timeline', tabindex: 0, role: 'application', 'aria-roledescription': 'timeline',
    'aria-label': `Timeline of one step, ${count(step.actions)} actions on ${rows} pipeline ranks. Left and right: actions. Up and down: ranks. `
      + 'Plus and minus: zoom. 0: the whole step. The table below has the same figures.',
  }, canvas);
  let at = -1;

  function drawItem(pen, item, x, paint) {
    const y = TOP + item.row * tall + 1;
    const left = Math.max(gutter(), x(item.start));
    const right = Math.min(canvas.clientWidth - RIGHT, x(item.stop));
    const width = Math.max(right - left - (right - left > 4 ? 0.75 : 0), 0.5);
    const chunk = plan.chunks > 1 && item.stage >= 0 ? own[item.stage] / plan.chunks : 0;
    pen.globalAlpha = 1 - 0.55 * chunk;
    pen.fillStyle = paint[COLOURS[item.kind]];
    pen.fillRect(left, y, width, tall - 2);
    pen.globalAlpha = 1;
    const sent = item.sendS ? Math.min(width, x(item.stop) - x(item.stop - item.sendS)) : 0;
    if (sent > 0.7) { pen.fillStyle = paint.send; pen.fillRect(left + width - sent, y, sent, tall - 2); }
    if (width > 16 && tall > 12 && item.kind !== 'O') {
      pen.fillStyle = chunk > 0.5 ? paint.text : paint[item.kind === 'B' || item.kind === 'I' ? 'on-backward' : 'on-colour'];
      pen.fillText(`${item.microbatch}`, left + width / 2, y + tall / 2 - 1, width);
    }
  }

  function draw() {
    const [wide, high] = [canvas.clientWidth, canvas.clientHeight];
    if (!wide) return;
    const ratio = devicePixelRatio || 1;
    Object.assign(canvas, { width: Math.round(wide * ratio), height: Math.round(high * ratio) });
    const pen = canvas.getContext('2d');
    pen.scale(ratio, ratio);
    const names = ['forward', 'backward', 'weight', 'once', 'send', 'bubble', 'line', 'soft', 'text', 'focus', 'on-colour', 'on-backward'];
    const paint = Object.fromEntries(names.map((name) => [name, colour(name)]));
    const x = scale(view, canvas);
    Object.assign(pen, { font: '11px system-ui, "DejaVu Sans", sans-serif', textBaseline: 'middle', textAlign: 'center' });
    for (const time of view.ticks((wide - gutter()) / 110)) {
      pen.fillStyle = paint.line;
      pen.fillRect(x(time), TOP - 5, 1, high);
      pen.fillStyle = paint.soft;
      if (x(time) < wide - 24) pen.fillText(time ? seconds(time) : '0', x(time), 8);
    }
    pen.textAlign = 'right';
    step.ranks.forEach((rank, row) => {
      pen.fillStyle = paint.bubble;
      pen.fillRect(gutter(), TOP + row * tall + 1, wide - gutter() - RIGHT, tall - 2);
      pen.fillStyle = paint.soft;
      if (row % Math.ceil(13 / tall) === 0) pen.fillText(plan.pipeline > 1 ? `rank ${rank.rank}` : 'all', gutter() - 8, TOP + (row + 0.5) * tall);
    });
    pen.textAlign = 'center';
    for (let row = 0; row < rows; row += 1) {
      for (let i = find(items, first[row], last(row), view.from); i < last(row) && items[i].start < view.to; i += 1) {
        if (items[i].kind !== 'idle' && items[i].stop > view.from) drawItem(pen, items[i], x, paint);
      }
    }
    if (at >= 0) {
      Object.assign(pen, { strokeStyle: paint.focus, lineWidth: 2 });
      pen.strokeRect(x(items[at].start), TOP + items[at].row * tall + 1, Math.max(2, x(items[at].stop) - x(items[at].start)), tall - 2);
    }
    if (view.cursor !== null) { pen.fillStyle = paint.text; pen.fillRect(x(view.cursor), TOP - 5, 1, high); }
    box.dataset.shown = view.words;
  }

  function describe(item) {
    const stage = plan.stages[item.stage];
    const names = stage && item.kind !== 'idle' ? [plan.layers[stage.layers[0]][0], plan.layers[stage.layers[1] - 1][0]] : null;
    return h('div', {}, h('b', {}, title(item)), facts(item).map((fact) => h('div', {}, fact)),
      names && h('div', { class: 'soft' }, names[0] === names[1] ? names[0] : `${names[0]} ... ${names[1]}`));
  }

  interact(box, view, (event, time) => {
    const row = event ? Math.floor((event.clientY - canvas.getBoundingClientRect().top - TOP) / tall) : -1;
    const item = row >= 0 && row < rows && view.cursor !== null ? items[find(items, first[row], last(row), time)] : null;
    tip(item && time <= item.stop ? describe(item) : null, event ? event.clientX : 0, event ? event.clientY : 0);
  });
  redraw(box, draw, view);

  const select = (index) => {
    at = Math.max(0, Math.min(items.length - 1, index));
    const item = items[at];
    view.show(item.start, item.stop);
    view.point((item.start + item.stop) / 2);
    const { left, top } = canvas.getBoundingClientRect();
    tip(describe(item), left + scale(view, canvas)(view.cursor), top + TOP + (item.row + 1) * tall);
    say([title(item), ...facts(item)].join('. '));
  };
  const rank = (change) => {
    const now = at < 0 ? { row: 0, start: 0 } : items[at];
    const row = Math.max(0, Math.min(rows - 1, now.row + (at < 0 ? 0 : change)));
    select(find(items, first[row], last(row), now.start));
  };
  const told = (action) => () => { action(); view.tell(); };
  const keys = {
    ArrowRight: () => select(at + 1), ArrowLeft: () => select(at - 1), ArrowDown: () => rank(1), ArrowUp: () => rank(-1),
    Home: () => select(first[at < 0 ? 0 : items[at].row]), End: () => select(last(at < 0 ? 0 : items[at].row) - 1),
    '+': told(() => view.zoom(0.5)), '=': told(() => view.zoom(0.5)), '-': told(() => view.zoom(2)), 0: told(() => view.whole()),
    Escape: () => tip(null),
  };
  box.addEventListener('keydown', (event) => {
    const action = event.ctrlKey || event.metaKey || event.altKey ? null : keys[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  });
  box.addEventListener('blur', () => { at = -1; tip(null); view.point(null); draw(); });

  const kinds = new Set(items.map((item) => item.kind));
  const words = Object.keys(WORDS).filter((kind) => kinds.has(kind) && kind !== 'idle').map((kind) => [WORDS[kind], COLOURS[kind]]);
  if (items.some((item) => item.sendS)) words.push(['send, at the end of an action', 'send']);
  return h('figure', {}, legend([...words, ['bubble', 'bubble']]), box,
    h('figcaption', {}, 'Numbers are microbatches. ', plan.chunks > 1 ? 'Each device has several stages: the later in the model, the fainter. ' : '',
      step.left_out ? h('p', { class: 'note' }, step.left_out) : null),
    lazy('Actions as a table', () => actionTable(step, items, first, last)));
}

function actionTable(step, items, first, last) {
  const holder = h('div', {});
  const show = (row, most) => {
    const own = items.slice(first[row], last(row));
    const idle = own.filter((item) => item.kind === 'idle').reduce((sum, item) => sum + item.stop - item.start, 0);
    const words = `Actions of pipeline rank ${step.ranks[row].rank}, ${percent(idle / step.end_s)} of the step is bubble`;
    holder.replaceChildren(
      table(words, [['action', ''], ['start', 'number'], ['seconds', 'number'], ['sends', 'number'], ['memory', 'number']],
        own.slice(0, most).map((item) => [title(item), seconds(item.start), seconds(item.stop - item.start),
          item.sendS ? `${size(item.bytes)} in ${seconds(item.sendS)}` : '-', item.memory ? size(item.memory) : '-'])),
      own.length > most
        ? h('button', { type: 'button', on: { click: () => show(row, most + 5 * PAGE) } }, `${count(own.length - most)} more rows`)
        : '');
  };
  show(0, PAGE);
  const choice = h('select', { on: { change: (event) => show(Number(event.target.value), PAGE) } },
    step.ranks.map((rank, row) => h('option', { value: row }, `pipeline rank ${rank.rank}`)));
  return h('div', {}, h('label', { class: 'tools' }, 'Actions of ', choice), holder);
}

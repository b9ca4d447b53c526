// The pipeline timeline: every action of every pipeline rank, with the sends at their ends and the bubbles between them.
import { clip, draw, narrow, slider, timeAxis, tooltip, Window } from './charts.js';
import { colour, h, lazy, legend, say, table } from './dom.js';
import { count, percent, seconds, size } from './format.js';

const WORDS = { F: 'forward', B: 'backward', I: 'backward, gradients of inputs', W: 'backward, gradients of weights', O: 'once a step', idle: 'bubble' };
const COLOURS = { F: 'forward', B: 'backward', I: 'backward', W: 'weight', O: 'once', idle: 'bubble' };
const PAGE = 200; // rows of the table of actions at a time

// All actions and bubbles in one list; `first[row]` is where a rank's begin.
export function actionsOf(step) {
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

function title(item) {
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

// `others` has the windows of the timelines on the page: they show the same part of the step.
export function timeline(plan, end, others) {
  const { step } = plan;
  const { items, first } = actionsOf(step);
  const rows = step.ranks.length;
  const own = new Map(); // which stage of its device a stage is, in order
  plan.stages.forEach((stage, s) => own.set(s, plan.stages.slice(0, s).filter((other) => other.rank === stage.rank).length));
  const rowHeight = Math.max(13, Math.min(30, 420 / rows));
  const height = Math.round(rows * rowHeight + 90);
  const box = h('div', {
    class: 'chart timeline', style: { height: `${height}px` }, tabindex: 0, role: 'application', 'aria-roledescription': 'timeline',
    'aria-label': `Timeline of one step, ${count(step.actions)} actions on ${rows} pipeline ranks. Left and right: actions. Up and down: ranks. `
      + 'Plus and minus: zoom. 0: the whole step. The table below has the same figures.',
  });

  const option = () => {
    const paint = Object.fromEntries(Object.entries(COLOURS).map(([kind, name]) => [kind, colour(name)]));
    const [send, hatch] = [colour('send'), colour('hatch')];
    const inside = Object.fromEntries(Object.entries(COLOURS).map(([kind, name]) => [kind, colour(name === 'backward' ? 'on-backward' : 'on-colour')]));
    return {
      animation: false,
      grid: { left: narrow() ? 34 : 58, right: 14, top: 8, bottom: 58 },
      tooltip: { ...tooltip(), trigger: 'item', formatter: ({ dataIndex }) => describe(items[dataIndex]) },
      xAxis: timeAxis(end),
      yAxis: {
        type: 'category', inverse: true, data: step.ranks.map((rank) => (narrow() ? `${rank.rank}` : `rank ${rank.rank}`)),
        axisLabel: { color: colour('soft') }, axisTick: { show: false }, axisLine: { lineStyle: { color: colour('line') } },
      },
      dataZoom: [
        { type: 'inside', xAxisIndex: 0, filterMode: 'weakFilter', zoomOnMouseWheel: 'ctrl', moveOnMouseWheel: false, preventDefaultMouseMove: false, minSpan: 1e-3 },
        { ...slider(), xAxisIndex: 0, filterMode: 'weakFilter', minSpan: 1e-3 },
      ],
      series: [{
        type: 'custom', encode: { x: [1, 2], y: 0 }, progressive: 0, clip: true,
        data: items.map((item) => [item.row, item.start, item.stop]),
        renderItem: (params, api) => {
          const item = items[params.dataIndex];
          const [x, y] = api.coord([item.start, item.row]);
          const width = Math.max(api.coord([item.stop, item.row])[0] - x, 0.4);
          const tall = api.size([0, 1])[1] * (item.kind === 'idle' ? 0.5 : 0.82);
          const shape = clip({ x, y: y - tall / 2, width, height: tall }, params.coordSys);
          if (!shape) return null;
          const chunk = plan.chunks > 1 && item.stage >= 0 && item.kind !== 'idle' ? own.get(item.stage) / plan.chunks : 0;
          const style = { fill: paint[item.kind], opacity: 1 - 0.55 * chunk };
          if (item.kind === 'idle') Object.assign(style, { stroke: hatch, lineWidth: width > 3 ? 0.5 : 0 });
          const rect = { type: 'rect', shape, style, emphasis: { style: { stroke: colour('focus'), lineWidth: 2 } } };
          if (shape.width > 18 && tall > 10 && item.kind !== 'idle' && item.kind !== 'O') {
            rect.textContent = { style: { text: `${item.microbatch}`, fill: chunk > 0.5 ? colour('text') : inside[item.kind], fontSize: 11 } };
            rect.textConfig = { position: 'inside' };
          }
          const sent = item.sendS ? item.sendS / (item.stop - item.start) * width : 0;
          if (sent < 0.7) return rect;
          const tail = clip({ x: x + width - sent, y: y - tall / 2, width: sent, height: tall }, params.coordSys);
          return { type: 'group', children: tail ? [rect, { type: 'rect', shape: tail, style: { fill: send } }] : [rect] };
        },
      }],
    };
  };

  function describe(item) {
    const stage = plan.stages[item.stage];
    const names = stage && item.kind !== 'idle' ? [plan.layers[stage.layers[0]][0], plan.layers[stage.layers[1] - 1][0]] : null;
    return h('div', { class: 'tip' }, h('b', {}, title(item)), facts(item).map((fact) => h('div', {}, fact)),
      names && h('div', { class: 'soft' }, names[0] === names[1] ? names[0] : `${names[0]} ... ${names[1]}`));
  }

  let chart;
  let view;
  let at = -1;
  const select = (index) => {
    at = Math.max(0, Math.min(items.length - 1, index));
    const item = items[at];
    view.show(100 * item.start / end, 100 * item.stop / end);
    chart.dispatchAction({ type: 'showTip', seriesIndex: 0, dataIndex: at });
    say([title(item), ...facts(item)].join('. '));
  };
  const rank = (change) => {
    const now = at < 0 ? { row: 0, start: 0 } : items[at];
    const row = Math.max(0, Math.min(rows - 1, now.row + (at < 0 ? 0 : change)));
    const stop = row + 1 < rows ? first[row + 1] : items.length;
    let index = first[row];
    while (index + 1 < stop && items[index + 1].start <= now.start) index += 1;
    select(index);
  };
  const keys = {
    ArrowRight: () => select(at + 1), ArrowLeft: () => select(at - 1), ArrowDown: () => rank(1), ArrowUp: () => rank(-1),
    Home: () => select(first[at < 0 ? 0 : items[at].row]),
    End: () => { const row = at < 0 ? 0 : items[at].row; select((row + 1 < rows ? first[row + 1] : items.length) - 1); },
    '+': () => view.zoom(0.5), '=': () => view.zoom(0.5), '-': () => view.zoom(2), 0: () => view.whole(),
    Escape: () => chart.dispatchAction({ type: 'hideTip' }),
  };
  box.addEventListener('keydown', (event) => {
    const action = event.ctrlKey || event.metaKey || event.altKey ? null : keys[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  });

  const button = (label, text, action) => h('button', { type: 'button', 'aria-label': label, on: { click: action } }, text);
  const kinds = new Set(items.map((item) => item.kind));
  const words = Object.keys(WORDS).filter((kind) => kinds.has(kind) && kind !== 'idle').map((kind) => [WORDS[kind], COLOURS[kind]]);
  if (items.some((item) => item.sendS)) words.push(['send, at the end of an action', 'send']);
  const element = h('figure', {},
    legend([...words, ['bubble', 'bubble']]),
    h('div', { class: 'tools' },
      button('Zoom in', '+ zoom in', () => view.zoom(0.5)), button('Zoom out', '− zoom out', () => view.zoom(2)),
      button('Earlier', '◀ earlier', () => view.move(-0.5)), button('Later', 'later ▶', () => view.move(0.5)),
      button('Whole step', 'whole step', () => view.whole())),
    box,
    h('figcaption', {}, 'Numbers are microbatches. '
      + (plan.chunks > 1 ? 'Each device has several stages: the later in the model, the fainter. ' : '')
      + 'Drag the bar below the timeline, pinch, or turn the wheel with Ctrl to zoom. With the keyboard: arrows go from action to action, + and − zoom, 0 shows the whole step.',
      step.left_out ? h('p', { class: 'note' }, step.left_out) : null),
    lazy('Actions as a table', () => actionTable(plan, items, first)));
  return {
    element,
    start: () => {
      chart = draw(box, option);
      view = new Window(chart);
      others.push(view);
      chart.on('datazoom', () => {
        others.forEach((other) => other.follow(view.range));
        const [from, to] = view.range.map((share) => seconds(share / 100 * end));
        box.dataset.shown = `${from} to ${to}`;
        say(`shown: ${from} to ${to}`);
      });
    },
  };
}

function actionTable(plan, items, first) {
  const { step } = plan;
  const holder = h('div', {});
  const show = (row, most) => {
    const own = items.slice(first[row], row + 1 < first.length ? first[row + 1] : items.length);
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

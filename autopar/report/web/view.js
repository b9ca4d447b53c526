// The part of the step that the charts of a page show together: from `from` to `to`, in seconds, and the time under the pointer.
import { button, h, say } from './dom.js';
import { seconds } from './format.js';

export const gutter = () => (innerWidth < 600 ? 46 : 64); // pixels left of a chart's plot
export const RIGHT = 12;

export class View {
  constructor(end) {
    Object.assign(this, { end, from: 0, to: end, cursor: null, calls: [] });
  }

  follow(call) { this.calls.push(call); }

  changed() { this.calls.forEach((call) => call(this)); }

  set(from, to) {
    const width = Math.min(this.end, Math.max(to - from, this.end * 1e-5));
    this.from = Math.min(Math.max(0, from), this.end - width);
    this.to = this.from + width;
    this.changed();
  }

  // The words for screen readers, after a change by buttons or keys.
  tell() { say(`shown: ${this.words}`); }

  get words() { return `${seconds(this.from)} to ${seconds(this.to)}`; }

  zoom(factor, at = (this.from + this.to) / 2) { this.set(at - (at - this.from) * factor, at + (this.to - at) * factor); }

  move(share) { const step = share * (this.to - this.from); this.set(this.from + step, this.to + step); }

  whole() { this.set(0, this.end); }

  // Make a part of the step visible.
  show(from, to) {
    if (from >= this.from && to <= this.to) return;
    const width = Math.max(this.to - this.from, to - from);
    this.set((from + to - width) / 2, (from + to + width) / 2);
  }

  point(time) {
    if (time === this.cursor) return;
    this.cursor = time;
    this.changed();
  }

  // Times of round numbers, about `most` of them.
  ticks(most) {
    const rough = (this.to - this.from) / Math.max(2, most);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((n) => n * power).find((one) => one >= rough);
    const found = [];
    for (let k = Math.ceil(this.from / step); k * step <= this.to; k += 1) found.push(k * step);
    return found;
  }
}

const span = (element) => element.clientWidth - gutter() - RIGHT;
export const scale = (view, element) => {
  const width = span(element);
  return (time) => gutter() + (time - view.from) / (view.to - view.from) * width;
};

// Ctrl and wheel, a pinch and dragging move the view; `over(event, time)` is called where the pointer rests, `over(null)` where it leaves.
export function interact(element, view, over) {
  const fingers = new Map();
  let start = 0; // where the last finger came down
  const timeAt = (x) => view.from + (x - element.getBoundingClientRect().left - gutter()) / span(element) * (view.to - view.from);
  element.addEventListener('wheel', (event) => {
    if (!event.ctrlKey && !event.deltaX) return;
    event.preventDefault();
    if (event.ctrlKey) view.zoom(1.0015 ** event.deltaY, timeAt(event.clientX));
    else view.move(event.deltaX / span(element));
  }, { passive: false });
  element.addEventListener('pointerdown', (event) => {
    fingers.set(event.pointerId, event.clientX);
    start = event.clientX;
    element.setPointerCapture(event.pointerId);
  });
  const rest = (event) => {
    const time = timeAt(event.clientX);
    view.point(time >= view.from && time <= view.to ? time : null);
    over(event, time);
  };
  element.addEventListener('pointerup', (event) => { if (Math.abs(event.clientX - start) < 5) rest(event); }); // a tap
  ['pointerup', 'pointercancel'].forEach((name) => element.addEventListener(name, (event) => fingers.delete(event.pointerId)));
  element.addEventListener('pointerleave', (event) => { if (event.pointerType !== 'touch') { view.point(null); over(null); } });
  element.addEventListener('pointermove', (event) => {
    const before = fingers.get(event.pointerId);
    if (before === undefined) { rest(event); return; }
    const others = [...fingers].filter(([id]) => id !== event.pointerId).map(([, x]) => x);
    fingers.set(event.pointerId, event.clientX);
    over(null);
    if (others.length) view.zoom(Math.abs(before - others[0]) / Math.max(1, Math.abs(event.clientX - others[0])), timeAt(others[0]));
    else view.move((before - event.clientX) / span(element));
  });
}

// The drawings of the report that is shown.
const drawings = new Set();
export const forget = () => drawings.clear();
export const drawAll = () => drawings.forEach((draw) => draw());
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', drawAll);

// Draw again if the element's width, the colours of the system or the view, if there is one, change.
export function redraw(element, draw, view = null) {
  new ResizeObserver(draw).observe(element);
  drawings.add(draw);
  if (view) view.follow(draw);
}

export function controls(view) {
  const act = (label, text, action) => button(text, () => { action(); view.tell(); }, { 'aria-label': label });
  const shown = h('span', { class: 'soft' });
  const note = () => { shown.textContent = view.to - view.from < view.end * 0.999 ? view.words : ''; };
  view.follow(note);
  return h('div', { class: 'tools' },
    act('Zoom in', '+', () => view.zoom(0.5)), act('Zoom out', '−', () => view.zoom(2)),
    act('Earlier', '◀', () => view.move(-0.5)), act('Later', '▶', () => view.move(0.5)),
    act('Whole step', 'whole step', () => view.whole()), shown);
}

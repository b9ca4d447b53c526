// The cluster as a drawing: a box for each node, in it a tile for each GPU with the part of the training that it holds and its memory.
import { h, svg } from './dom.js';
import { count, percent, plural, size } from './format.js';
import { NAMES, PARTS } from './memory.js';
import { redraw } from './view.js';

const MOST = 64; // devices that are all drawn; of larger clusters, nodes that differ only in their data-parallel ranks are drawn once
const BOXES = 6; // nodes in sight before the others are unfolded
const [MOST_WIDE, GAP, HEAD] = [300, 6, 26]; // pixels: a tile's width, between tiles, above them
const [ONE_LINE, TWO_LINES] = [40, 56]; // pixels: a tile's height

// A device's pipeline rank and its rank in every group (TP, DP, ...) of the strategy that most layers of its stages have.
function place(plan, stage, device) {
  const local = device - stage.devices[0];
  const groups = Object.entries(plan.ranks.own[stage.rank].groups).map(([name, axes]) => [name,
    axes.reduce((index, [size_, stride]) => index * size_ + Math.floor(local / stride) % size_, 0)]);
  return { device, rank: stage.rank, groups: Object.fromEntries(groups) };
}

const unit = (plan) => (plan.gpus_per_node ? 'GPU' : 'device');
const degree = (axes) => axes.reduce((product, [size_]) => product * size_, 1);
const moving = (name) => name === 'DP' || name === 'ZeRO';

// Nodes of equal contents together: lists of nodes, which are lists of places.
export function nodeKinds(plan) {
  const perStage = plan.stages[0].devices[1];
  const width = plan.gpus_per_node || Math.min(8, perStage, plan.device_count);
  const kinds = new Map();
  const has = (stage, device) => device >= stage.devices[0] && device < stage.devices[0] + stage.devices[1];
  let [stage] = plan.stages;
  for (let first = 0; first < plan.device_count; first += width) {
    const node = [];
    for (let device = first; device < Math.min(first + width, plan.device_count); device += 1) {
      if (!has(stage, device)) stage = plan.stages.find((one) => has(one, device));
      node.push(place(plan, stage, device));
    }
    const key = plan.device_count <= MOST ? first : JSON.stringify(node.map((one) => [one.rank,
      ...Object.entries(one.groups).map(([name, index]) => (name === 'ZeRO' ? 0 : moving(name) ? index - node[0].groups[name] : index))]));
    kinds.set(key, [...(kinds.get(key) || []), node]);
  }
  return [...kinds.values()];
}

// Ascending numbers in short: `3`, `0–127` or `0, 8 … 1016`.
function numbers(values) {
  const [first, second, last] = [values[0], values[1], values[values.length - 1]];
  if (last === first) return `${first}`;
  if (last - first === values.length - 1) return values.length === 2 ? `${first}, ${last}` : `${first}–${last}`;
  return values.length === 2 ? `${first}, ${last}` : `${first}, ${second} … ${last}`;
}

const ascending = (values) => [...new Set(values)].sort((a, b) => a - b);

function stageText(plan, rank) {
  if (plan.pipeline === 1) return '';
  const stages = plan.ranks.stages[rank];
  return stages.length > 1 ? `PP ${rank} (${stages.length} stages)` : `stage ${stages[0]}`;
}

// A tile's second line, such as `TP 0 · DP 3`, of the devices at one position of equal nodes.
const groupText = (plan, same) => Object.keys(same[0].groups).filter((name) => name !== 'ZeRO').reverse()
  .map((name) => `${name.replace('2D or 3D ', '')} ${numbers(ascending(same.map((one) => one.groups[name])))}`).join(' · ') || (plan.pipeline === 1 ? 'whole model' : 'no replicas');

const HOLDS = {
  TP: (n) => `1/${n} of every sharded weight matrix`, '2D or 3D TP': (n) => `1/${n} of every sharded weight matrix and activation`, EP: (n) => `1/${n} of the experts`,
  DP: (n) => `1/${n} of the batch`, CP: (n) => `1/${n} of every sequence (ring attention)`, Ulysses: (n) => `1/${n} of every sequence, 1/${n} of the heads in attention`,
};
const SHARDED = { 1: 'optimizer states', 2: 'gradients and optimizer states', 3: 'parameters, gradients and optimizer states' };

// What the devices at one position of equal nodes hold, in words and figures.
function detail(plan, same) {
  const { rank, device } = same[0];
  const own = plan.ranks.stages[rank].map((s) => plan.stages[s]);
  const layers = own.map(({ layers: [start, stop] }) => (stop - start === 1 ? plan.layers[start][0] : `${plan.layers[start][0]} ... ${plan.layers[stop - 1][0]}`));
  const { groups, zero, strategies } = plan.ranks.own[rank];
  const held = Object.entries(groups).map(([name, axes]) => {
    const at = numbers(ascending(same.map((one) => one.groups[name])));
    return name === 'ZeRO' ? [`ZeRO ${zero}`, `shard ${at} of ${count(degree(axes))}: ${SHARDED[zero]}`] : [`${name} ${at}`, HOLDS[name](degree(axes))];
  });
  const stage = own[0];
  const sum = PARTS.reduce((bytes, part) => bytes + stage.memory[part], 0);
  const exceptions = strategies.slice(1).map(([text, names]) => [names.length > 2 ? `${names[0]} and ${names.length - 1} more` : names.join(', '), text]);
  if (exceptions.length) held.unshift([`${strategies[0][1].length} of ${plural(strategies.reduce((n, [, names]) => n + names.length, 0), 'layer')}`, strategies[0][0]]);
  return h('div', {},
    h('h3', {}, same.length > 1 ? `${unit(plan)}s ${numbers(same.map((one) => one.device))}` : `${unit(plan)} ${device}`),
    h('dl', { class: 'holds' },
      h('dt', {}, own.length > 1 ? `PP ${rank}` : stageText(plan, rank) || 'layers'), h('dd', {}, own.length > 1 ? `${own.length} stages: ` : '', layers.length > 2 ? `${layers[0]}, ${layers[1]} … ${layers[layers.length - 1]}` : layers.join(', ')),
      [...held, ...exceptions].map(([name, text]) => [h('dt', {}, name), h('dd', {}, text)])),
    h('p', { class: 'full' }, h('b', {}, size(sum)), ` of ${size(stage.limit_bytes)} (${percent(sum / stage.limit_bytes, 0)})`),
    h('ul', { class: 'parts' }, PARTS.map((part) => h('li', {},
      h('span', { class: 'swatch', style: { background: `var(--${part})` } }), NAMES[part],
      h('span', { class: 'number' }, size(stage.memory[part]))))));
}

// One hue for each pipeline rank; the text beside it says which.
const hue = (plan, rank) => `hsl(${Math.round(205 + 290 * rank / Math.max(plan.pipeline, 2))} 55% 50%)`;

const nameOf = (plan, same) => (same.length > 1 ? '' : `${unit(plan)} ${same[0].device}`);
// A tile's stage, its ranks in the groups, and its number.
const labels = (plan, same) => [stageText(plan, same[0].rank), groupText(plan, same), nameOf(plan, same)];
const joined = (texts) => texts.filter(Boolean).join(' · ');

function tile(plan, same, { wide, tall }, choose) {
  const { rank } = same[0];
  const stage = plan.stages[plan.ranks.stages[rank][0]];
  const sum = PARTS.reduce((bytes, part) => bytes + stage.memory[part], 0);
  const [text, second, name] = labels(plan, same);
  const full = percent(sum / stage.limit_bytes, 0);
  const [y, width] = [tall - 14, wide - 56];
  let at = 0;
  const parts = PARTS.map((part) => {
    const from = at;
    at = Math.min(width, at + stage.memory[part] / stage.limit_bytes * width);
    return svg('rect', { x: 12 + from, y, width: at - from, height: 8, class: `fill-${part}` });
  });
  const lines = tall === ONE_LINE ? [svg('text', { x: 12, y: 17 }, svg('tspan', { class: 'strong' }, text || second), text ? ` · ${second}` : '')]
    : [svg('text', { x: 12, y: 16, class: 'strong' }, text), svg('text', { x: 12, y: 33 }, second)];
  return svg('g', {
    class: 'gpu', tabindex: -1, role: 'img', 'aria-label': `${name || plural(same.length, unit(plan))}: ${joined([text, second])}, memory ${size(sum)} of ${size(stage.limit_bytes)}`,
    on: { pointerenter: choose, focus: choose, click: choose },
  },
  svg('rect', { width: wide, height: tall, rx: 4, class: 'tile' }), svg('rect', { width: 4, height: tall, rx: 2, style: { fill: hue(plan, rank) } }),
  lines, svg('text', { x: wide - 8, y: tall === ONE_LINE ? 17 : 16, 'text-anchor': 'end', class: 'soft' }, name),
  svg('rect', { x: 12, y, width, height: 8, rx: 2, class: 'empty' }), parts, svg('text', { x: wide - 8, y: tall - 6, 'text-anchor': 'end', class: 'soft' }, full));
}

// Tiles in a row of a box and their size, so that `boxes` boxes of `tiles` tiles fill the room without holes, in the fewest pixels of height.
function layout(room, boxes, tiles, texts) {
  const found = [];
  const longest = (of) => Math.max(...texts.map(of));
  const pixels = (text, name) => 6.6 * text.length + 6.2 * name.length + 34;
  const shapes = [[ONE_LINE, longest(([a, b, name]) => pixels(joined([a, b]), name))], [TWO_LINES, longest(([a, b, name]) => Math.max(pixels(a, name), pixels(b, '')))]];
  for (const [tall, least] of shapes) {
    for (let across = 1; across <= Math.min(8, tiles); across += 1) {
      const most = Math.floor((room + 10) / (across * (least + GAP) + GAP + 14));
      for (let inRow = 1; inRow <= Math.min(most, boxes); inRow += 1) {
        const wide = Math.floor(Math.min(MOST_WIDE, ((room + 10) / inRow - 14 - GAP) / across - GAP));
        const rows = Math.ceil(boxes / inRow);
        found.push({ across, wide, tall, height: rows * (HEAD + Math.ceil(tiles / across) * (tall + GAP)), holes: rows * inRow - boxes + (across - tiles % across) % across });
      }
    }
  }
  found.sort((a, b) => a.holes - b.holes || a.height - b.height || b.wide - a.wide);
  return found[0] || { across: 1, wide: Math.max(100, room - 2 * GAP - 4), tall: TWO_LINES };
}

function box(plan, nodes, { across, wide, tall }, tileOf) {
  const tiles = nodes[0].length;
  const [width, height] = [across * (wide + GAP) + GAP + 4, HEAD + Math.ceil(tiles / across) * (tall + GAP) + 4];
  const indices = nodes.map((node) => Math.floor(node[0].device / tiles));
  const words = !plan.gpus_per_node ? `devices ${numbers(nodes[0].map((one) => one.device))}${nodes.length > 1 ? ` and ${nodes.length - 1} more such groups` : ''}`
    : nodes.length > 1 ? `nodes ${numbers(indices)}` : `node ${indices[0]}`;
  return svg('svg', { class: 'node', width, height, role: 'group', 'aria-label': words },
    svg('rect', { x: 0.5, y: 0.5, width: width - 1, height: height - 1, rx: 7, class: 'box' }), svg('text', { x: GAP + 4, y: 17, class: 'strong' }, words),
    nodes[0].map((_, k) => svg('g', { transform: `translate(${GAP + 2 + (k % across) * (wide + GAP)} ${HEAD + Math.floor(k / across) * (tall + GAP)})` }, tileOf(nodes.map((node) => node[k])))));
}

export function cluster(plan) {
  const kinds = nodeKinds(plan);
  const texts = kinds.flatMap((nodes) => nodes[0].map((_, k) => labels(plan, nodes.map((node) => node[k]))));
  const panel = h('aside', { class: 'gpu-detail', 'aria-label': 'The chosen GPU' });
  let [tiles, chosen, room, across] = [[], 0, 0, 1];
  const choose = (index, same) => {
    tiles[chosen].classList.remove('chosen');
    tiles[chosen].setAttribute('tabindex', -1);
    chosen = index;
    tiles[chosen].classList.add('chosen');
    tiles[chosen].setAttribute('tabindex', 0);
    panel.replaceChildren(detail(plan, same));
  };
  const drawing = h('div', { class: 'cluster', role: 'group', 'aria-label': 'What each GPU holds. Arrow keys go from GPU to GPU.' });
  function draw() {
    if (!drawing.clientWidth || drawing.clientWidth === room) return;
    room = drawing.clientWidth;
    const [first, rest, sized] = [kinds.slice(0, BOXES), kinds.slice(BOXES), layout(room, Math.min(BOXES, kinds.length), kinds[0][0].length, texts)];
    across = sized.across;
    tiles = [];
    const tileOf = (same) => {
      const index = tiles.length;
      tiles.push(tile(plan, same, sized, () => choose(index, same)));
      return tiles[index];
    };
    const nodes = (some) => h('div', { class: 'nodes' }, some.map((one) => box(plan, one, sized, tileOf)));
    drawing.replaceChildren(nodes(first), ...(rest.length ? [h('details', {}, h('summary', {}, `${count(rest.length)} more kinds of nodes, with other stages or slices`), nodes(rest))] : []));
    tiles[chosen].dispatchEvent(new Event('focus'));
  }
  drawing.addEventListener('keydown', (event) => {
    const step = { ArrowRight: 1, ArrowDown: across, ArrowLeft: -1, ArrowUp: -across }[event.key];
    const next = step && tiles[tiles.indexOf(document.activeElement) + step];
    if (!next) return;
    event.preventDefault();
    next.focus();
  });
  redraw(drawing, draw);
  return h('div', { class: 'with-detail' }, drawing, panel);
}

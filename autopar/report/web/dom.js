// Elements. Strings become text nodes, never HTML.

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === 'on') for (const [event, call] of Object.entries(value)) element.addEventListener(event, call);
    else if (name === 'style') for (const [key, one] of Object.entries(value)) element.style.setProperty(key, one);
    else element.setAttribute(name, value === true ? '' : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

export const h = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
export const svg = (tag, attributes = {}, ...children) => fill(document.createElementNS('http://www.w3.org/2000/svg', tag), attributes, children);

// `columns` are [title, 'number' | 'long' | ''] pairs; a cell is text or a node. The first cell of a row is its header.
export function table(caption, columns, rows) {
  return h('div', { class: 'wide', tabindex: 0, role: 'region', 'aria-label': caption },
    h('table', {},
      h('caption', {}, h('span', {}, caption)),
      h('thead', {}, h('tr', {}, columns.map(([title, kind]) => h('th', { scope: 'col', class: kind || null }, title)))),
      h('tbody', {}, rows.map((row) => h('tr', {}, row.map((cell, i) => {
        if (cell instanceof Element && cell.tagName === 'TD') return cell;
        return h(i ? 'td' : 'th', { class: columns[i][1] || null, scope: i ? null : 'row' }, cell);
      }))))));
}

// A bar of `parts` ([title, colour, share]); the figures stand beside it.
export function bar(parts, mark = null) {
  const title = parts.map(([name, , share]) => `${name} ${(100 * share).toFixed(1)} %`).join(', ');
  return h('div', { class: 'bar', title, 'aria-hidden': 'true' },
    parts.map(([, tone, share]) => h('span', { style: { width: `${100 * share}%`, background: `var(--${tone})` } })),
    mark === null ? null : h('span', { class: 'mark', style: { left: `min(${100 * mark}%, 100% - 2px)` } }));
}

// Entries are [name, colour] or [name, colour, figure].
export function legend(entries) {
  return h('ul', { class: 'legend' }, entries.map(([name, tone, figure]) => h('li', {},
    h('span', { class: 'swatch', style: { background: `var(--${tone})` } }), name, figure === undefined ? null : h('b', {}, figure))));
}

// Contents that are made when they are first opened.
export function lazy(title, make) {
  const element = h('details', {}, h('summary', {}, title));
  element.addEventListener('toggle', () => {
    if (element.open && element.children.length === 1) element.append(make());
  });
  return element;
}

export const say = (text) => { document.getElementById('live').textContent = text; };
export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
export const button = (contents, action, more = {}) => h('button', { type: 'button', ...more, on: { click: action } }, contents);

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // no permission, or no secure context
    const area = document.body.appendChild(h('textarea', { class: 'hidden' }));
    area.value = text;
    area.select();
    document.execCommand('copy');
    area.remove();
  }
}

// A button that copies what `text()` returns; `what` completes "Copy ...".
export function copyButton(what, text) {
  const element = button(`Copy ${what}`, async () => {
    await copy(text());
    element.textContent = 'Copied';
    say(`copied ${what}`);
    setTimeout(() => { element.textContent = `Copy ${what}`; }, 1500);
    element.focus();
  }, { class: 'copy' });
  return element;
}

// The tooltip beside a point of the window; without contents it is hidden.
const box = h('div', { class: 'tip', 'aria-hidden': 'true' });
addEventListener('scroll', () => box.remove(), { passive: true });
export function tip(contents, x = 0, y = 0) {
  box.remove();
  if (!contents) return;
  box.replaceChildren(contents);
  document.body.append(box);
  const { width, height } = box.getBoundingClientRect();
  box.style.setProperty('left', `${Math.max(4, Math.min(innerWidth - width - 8, x + 14))}px`);
  box.style.setProperty('top', `${y + height + 20 > innerHeight ? Math.max(4, y - height - 12) : y + 16}px`);
}

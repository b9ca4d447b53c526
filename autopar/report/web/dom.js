// Elements. Strings become text nodes, never HTML.

export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === 'on') for (const [event, call] of Object.entries(value)) element.addEventListener(event, call);
    else if (name === 'style') for (const [key, one] of Object.entries(value)) element.style.setProperty(key, one);
    else element.setAttribute(name, value === true ? '' : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

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

// A bar of `parts` ([title, colour, share]); beside it stands the table that has the figures.
export function bar(parts, mark = null) {
  const title = parts.map(([name, , share]) => `${name} ${(100 * share).toFixed(1)} %`).join(', ');
  return h('div', { class: 'bar', title, 'aria-hidden': 'true' },
    parts.map(([, colour, share]) => h('span', { style: { width: `${100 * share}%`, background: `var(--${colour})` } })),
    mark === null ? null : h('span', { class: 'mark', style: { left: `${100 * mark}%` } }));
}

export function legend(entries) {
  return h('ul', { class: 'legend' }, entries.map(([name, tone]) => h('li', {},
    h('span', { class: 'swatch', style: { background: `var(--${tone})` } }), name)));
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

// The script of the pages of autopar: of `autopar report`, whose figures are in the document, and the part that `autopar ui` uses.
import { sideBySide } from './compare.js';
import { report } from './report.js';
import { drawAll } from './view.js';

export { drawAll, report, sideBySide };

const figures = document.getElementById('figures');
if (figures) {
  document.getElementById('main').append(...report(JSON.parse(figures.textContent).plans));
  drawAll();
  document.documentElement.dataset.ready = 'yes';
}

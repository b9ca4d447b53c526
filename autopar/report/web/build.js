// Bundles page.js with the parts of Apache ECharts that it imports into ../page.min.js, and ui.js into ../../ui/ui.min.js, with the licences
// of everything in them, and with the hashes that tests compare with the lock file and the sources.
import { createHash } from 'node:crypto';
import { readdirSync, readFileSync } from 'node:fs';
import { build } from 'esbuild';

const packages = { echarts: ['NOTICE', 'LICENSE'], zrender: ['LICENSE'], tslib: ['LICENSE.txt'] };
const hash = (text) => createHash('sha256').update(text).digest('hex');
const read = (path) => readFileSync(path, 'utf8');
const sources = readdirSync('.').filter((name) => name.endsWith('.js')).sort();
const version = (name) => JSON.parse(read(`node_modules/${name}/package.json`)).version;
if (/\*\/|<\//.test(Object.entries(packages).flatMap(([name, files]) => files.map((file) => read(`node_modules/${name}/${file}`))).join(''))) throw new Error('a licence ends the comment that it is in');

const banner = (title, inside) => `/*\n${[
  `${title}, built by \`make page\`. Do not edit.`,
  `lock file sha256 ${hash(read('package-lock.json'))}`,
  `sources sha256 ${hash(sources.map(read).join(''))}`,
  ...Object.keys(inside).map((name) => `contains ${name} ${version(name)}`),
  ...Object.entries(inside).flatMap(([name, files]) => files.map((file) => `\n---- ${name} ${file} ----\n${read(`node_modules/${name}/${file}`)}`)),
].join('\n')}\n*/`;
const bundle = (entry, outfile, title, inside) => build({
  entryPoints: [entry], bundle: true, minify: true, format: 'iife', target: 'es2020', charset: 'ascii',
  outfile, banner: { js: banner(title, inside) }, legalComments: 'none', logLevel: 'info',
});
await bundle('page.js', '../page.min.js', 'The script of a page of autopar', packages);
await bundle('ui.js', '../../ui/ui.min.js', 'The script of the page that `autopar ui` serves', {});

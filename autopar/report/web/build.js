// Bundles page.js with the parts of Apache ECharts that it imports into ../page.min.js, with the licences of everything in it, and with
// the hashes that tests/report compares with the lock file and the sources.
import { createHash } from 'node:crypto';
import { readdirSync, readFileSync } from 'node:fs';
import { build } from 'esbuild';

const packages = { echarts: ['NOTICE', 'LICENSE'], zrender: ['LICENSE'], tslib: ['LICENSE.txt'] };
const hash = (text) => createHash('sha256').update(text).digest('hex');
const read = (path) => readFileSync(path, 'utf8');
const sources = readdirSync('.').filter((name) => name.endsWith('.js')).sort();
const version = (name) => JSON.parse(read(`node_modules/${name}/package.json`)).version;
const banner = [
  'The script of a page of autopar, built by `make page`. Do not edit.',
  `lock file sha256 ${hash(read('package-lock.json'))}`,
  `sources sha256 ${hash(sources.map(read).join(''))}`,
  ...Object.keys(packages).map((name) => `contains ${name} ${version(name)}`),
  ...Object.entries(packages).flatMap(([name, files]) => files.map((file) => `\n---- ${name} ${file} ----\n${read(`node_modules/${name}/${file}`)}`)),
].join('\n');
if (/\*\/|<\//.test(banner)) throw new Error('a licence ends the comment that it is in');
await build({
  entryPoints: ['page.js'], bundle: true, minify: true, format: 'iife', target: 'es2020', charset: 'ascii',
  outfile: '../page.min.js', banner: { js: `/*\n${banner}\n*/` }, legalComments: 'none', logLevel: 'info',
});

// Bundles page.js into ../page.min.js, and ui.js into ../../ui/ui.min.js, with the hashes that tests compare with the lock file and the sources.
import { createHash } from 'node:crypto';
import { readdirSync, readFileSync } from 'node:fs';
import { build } from 'esbuild';

const hash = (text) => createHash('sha256').update(text).digest('hex');
const read = (path) => readFileSync(path, 'utf8');
const sources = readdirSync('.').filter((name) => name.endsWith('.js')).sort();

const banner = (title) => `/*\n${title}, built by \`make page\`. Do not edit.\nlock file sha256 ${hash(read('package-lock.json'))}\nsources sha256 ${hash(sources.map(read).join(''))}\n*/`;
const bundle = (entry, outfile, title, more) => build({
  entryPoints: [entry], bundle: true, minify: true, format: 'iife', target: 'es2022', charset: 'ascii', outfile, banner: { js: banner(title) }, logLevel: 'info', ...more,
});
await bundle('page.js', '../page.min.js', 'The script of a page of autopar', { globalName: 'autopar' });
await bundle('ui.js', '../../ui/ui.min.js', 'The script of the page that `autopar ui` serves', {});

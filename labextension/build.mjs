// Makes prebuilt/: what JupyterLab loads. First one script of ours and of ui/src, then JupyterLab's own builder.
import { spawnSync } from 'node:child_process';
import { createHash } from 'node:crypto';
import { copyFileSync, mkdirSync, readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { dirname, join, relative, sep } from 'node:path';
import { fileURLToPath } from 'node:url';
import { build } from 'esbuild';

const here = fileURLToPath(new URL('.', import.meta.url));
const root = join(here, '..');
const ui = join(root, 'ui');
const out = join(here, 'prebuilt');

function files(directory) {
  return readdirSync(directory, { withFileTypes: true }).flatMap(entry => (entry.isDirectory() ? files(join(directory, entry.name)) : [join(directory, entry.name)]));
}

/** Digest of all that goes in; tests compute it as well. */
function digest() {
  const hash = createHash('sha256');
  const own = ['src', 'style', 'schema'].flatMap(name => files(join(here, name)));
  const single = ['build.mjs', 'package.json', 'package-lock.json', 'tsconfig.json'].map(name => join(here, name));
  const inputs = [...own, ...single, ...files(join(ui, 'src')), join(ui, 'package-lock.json')];
  for (const name of inputs.map(path => relative(root, path).split(sep).join('/')).sort()) {
    hash.update(`${name}\0`).update(readFileSync(join(root, name))).update('\0');
  }
  return hash.digest('hex');
}

rmSync(join(here, 'lib'), { recursive: true, force: true });
mkdirSync(join(here, 'lib'), { recursive: true });
copyFileSync(join(ui, 'src', 'style.css'), join(here, 'lib', 'views.css'));
await build({
  entryPoints: [join(here, 'src', 'index.ts')],
  outfile: join(here, 'lib', 'index.js'),
  bundle: true,
  format: 'esm',
  target: 'es2022',
  charset: 'utf8',
  loader: { '.svg': 'text' },
  // JupyterLab has these; all else is of the drawing.
  external: ['@jupyterlab/*', '@lumino/*', 'react'],
});
const path = [dirname(process.execPath), process.env.PATH].join(':');
const done = spawnSync(process.env.JUPYTER_BUILDER ?? 'jupyter-builder', ['build', '.'], { cwd: here, stdio: 'inherit', env: { ...process.env, PATH: path } });
if (done.status !== 0) throw new Error(`jupyter-builder: ${done.error?.message ?? `exit status ${done.status}`}`);
writeFileSync(join(out, 'sources.txt'), `sha256:${digest()}\n`);

// Makes prebuilt/: what JupyterLab loads. First one script of ours and of ui/src, then JupyterLab's own builder.
import { spawnSync } from 'node:child_process';
import { createHash } from 'node:crypto';
import { mkdirSync, readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { dirname, join, relative, resolve, sep } from 'node:path';
import { fileURLToPath } from 'node:url';
import { build } from 'esbuild';

const here = fileURLToPath(new URL('.', import.meta.url));
const root = join(here, '..');
const ui = join(root, 'ui');
const out = join(here, 'prebuilt');

function files(directory) {
  return readdirSync(directory, { withFileTypes: true }).flatMap(entry => (entry.isDirectory() ? files(join(directory, entry.name)) : [join(directory, entry.name)]));
}

rmSync(join(here, 'lib'), { recursive: true, force: true });
mkdirSync(join(here, 'lib'), { recursive: true });
const styles = ['style.css', 'charts.css'].map(name => join(ui, 'src', name));
writeFileSync(join(here, 'lib', 'views.css'), styles.map(path => readFileSync(path, 'utf8')).join('\n'));
const { metafile } = await build({
  absWorkingDir: here,
  metafile: true,
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

// Which sources it was made from; tests look whether these are still the same.
const scripts = Object.keys(metafile.inputs).map(name => resolve(here, name)).filter(name => !name.includes('node_modules'));
const others = ['style', 'schema'].flatMap(name => files(join(here, name)));
const single = ['build.mjs', 'numbering.cjs', 'package.json', 'package-lock.json', 'tsconfig.json'].map(name => join(here, name));
const inputs = new Set([...scripts, ...others, ...single, ...styles, join(ui, 'package-lock.json')]);
const line = path => `${createHash('sha256').update(readFileSync(path)).digest('hex')}  ${relative(root, path).split(sep).join('/')}`;
writeFileSync(join(out, 'sources.txt'), `${[...inputs].sort().map(line).join('\n')}\n`);

// What came out: a file that was changed by hand, or by somebody else, is told from what was built.
const made = path => `${createHash('sha256').update(readFileSync(path)).digest('hex')}  ${relative(out, path).split(sep).join('/')}`;
writeFileSync(join(here, 'outputs.txt'), `${files(out).sort().map(made).join('\n')}\n`);

// Bundles the widgets' scripts and says in their first line which sources they were made from, and in outputs.txt what came out.
import { createHash } from 'node:crypto';
import { appendFileSync, readFileSync, readdirSync, writeFileSync } from 'node:fs';
import { join, relative, sep } from 'node:path';
import { fileURLToPath } from 'node:url';
import { build } from 'esbuild';

const here = fileURLToPath(new URL('.', import.meta.url));
const out = process.argv[2] ?? join(here, '..', 'widgets', 'static');

function files(directory) {
  return readdirSync(directory, { withFileTypes: true }).flatMap(entry => (entry.isDirectory() ? files(join(directory, entry.name)) : [join(directory, entry.name)]));
}

/** Digest of all that goes into the bundles; tests compute it as well. */
function digest() {
  const hash = createHash('sha256');
  const inputs = [...files(join(here, 'src')), join(here, 'build.mjs'), join(here, 'package-lock.json')];
  for (const file of inputs.map(path => relative(here, path).split(sep).join('/')).sort()) {
    hash.update(`${file}\0`).update(readFileSync(join(here, file))).update('\0');
  }
  return hash.digest('hex');
}

const banner = `sources: sha256:${digest()}`;
for (const name of ['timeline', 'ranks', 'membership', 'strip', 'metrics']) {
  const { metafile } = await build({
    entryPoints: [join(here, 'src', 'widget', `${name}.ts`)],
    outfile: join(out, `${name}.js`),
    bundle: true,
    format: 'esm',
    target: 'es2022',
    minify: true,
    charset: 'utf8',
    legalComments: 'none',
    banner: { js: `/* ${banner} */` },
    metafile: true,
  });
  // Its licence wants to be with each copy.
  if (Object.keys(metafile.inputs).some(input => input.includes('node_modules/uplot/'))) {
    const licence = readFileSync(join(here, 'node_modules', 'uplot', 'LICENSE'), 'utf8').trim();
    appendFileSync(join(out, `${name}.js`), `/* Contains uPlot.\n\n${licence}\n*/\n`);
  }
}
for (const [name, sources] of [['views', ['style', 'charts', 'membership']], ['strip', ['strip']]]) {
  const style = sources.map(source => readFileSync(join(here, 'src', `${source}.css`), 'utf8')).join('');
  writeFileSync(join(out, `${name}.css`), `/* ${banner} */\n${style}`);
}

// What came out: a bundle that was changed by hand, or by somebody else, is told from what was built.
if (process.argv[2] === undefined) {
  const line = name => `${createHash('sha256').update(readFileSync(join(out, name))).digest('hex')}  ${name}`;
  const names = readdirSync(out).filter(name => /\.(js|css)$/.test(name)).sort();
  writeFileSync(join(here, 'outputs.txt'), `${names.map(line).join('\n')}\n`);
}

// Translates the tests for the node that is there and runs them.
import { spawnSync } from 'node:child_process';
import { mkdtempSync, readdirSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { build } from 'esbuild';

const here = fileURLToPath(new URL('.', import.meta.url));
const out = mkdtempSync(join(tmpdir(), 'hvdlab-panel-'));
try {
  const tests = readdirSync(here).filter(name => name.endsWith('.test.ts'));
  // JupyterLab's packages are meant for its builder: as modules of node they need `require`.
  await build({ entryPoints: tests.map(name => join(here, name)), outdir: out, outExtension: { '.js': '.cjs' }, bundle: true, platform: 'node', format: 'cjs', logLevel: 'error', sourcemap: 'inline' });
  const files = tests.map(name => join(out, name.replace(/ts$/, 'cjs')));
  process.exitCode = spawnSync(process.execPath, ['--enable-source-maps', '--test', ...files], { stdio: 'inherit' }).status;
} finally {
  rmSync(out, { recursive: true });
}

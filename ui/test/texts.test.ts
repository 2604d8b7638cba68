import assert from 'node:assert/strict';
import { readdirSync, readFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { join, relative } from 'node:path';
import { test } from 'node:test';
import type * as TypeScript from 'typescript';

// As a whole it would be bundled into the test.
const ts = createRequire(join(process.cwd(), 'package.json'))('typescript') as typeof TypeScript;

const ROOT = join(process.cwd(), '..');
const PLACES = ['ui/src/view', 'ui/src/draw', 'ui/src/widget', 'labextension/src'];
/** What gives a text of the reader's language. */
const TRANSLATES = /(^t|\.__|\._n)$/;
/** Calls whose texts no reader sees. */
const UNSEEN = /(querySelector(All)?|closest|matches|getElementById|console\.\w+|setAttribute|createElement|addClass|getContext|classList\.\w+|matchMedia|getPropertyValue|hasCommand|execute)$/;
/** Names of attributes and of properties whose values readers see or hear. */
const SEEN = new Set(['aria-label', 'aria-roledescription', 'title', 'placeholder', 'label', 'caption', 'alt']);
/** Fonts and other styles, class names, magics, and what a kernel and the extension manager are told. */
const NO_TEXT = /system-ui|\dpx |^hvd-|^%(load_ext|hvd_)|^kernel subshells$|^A panel with the timeline of all ranks\.$/;
const KEYS = /^(Arrow\w+|Enter|Escape|Home|End|Page\w+|Control|Shift|Space|Tab|Notebook|Editor)$/;
/** Two words, or one that begins a sentence. */
const PHRASE = /[A-Za-z]{2,}[,:;.]? [A-Za-z]{2,}|^[A-Z][a-z]+[.…]?$/;

function files(directory: string): string[] {
  return readdirSync(directory, { withFileTypes: true }).flatMap(entry => (entry.isDirectory() ? files(join(directory, entry.name)) : entry.name.endsWith('.ts') ? [join(directory, entry.name)] : []));
}

function textOf(node: TypeScript.Node): string | null {
  if (ts.isStringLiteralLike(node)) return node.text;
  if (ts.isTemplateExpression(node)) return [node.head.text, ...node.templateSpans.map(span => span.literal.text)].join('1');
  return null;
}

/** Whether a reader sees a text that nobody can translate. */
function offends(node: TypeScript.Node): boolean {
  const text = textOf(node);
  if (text === null || !/[A-Za-z]{2}/.test(text)) return false;
  const { parent } = node;
  const attribute = ts.isPropertyAssignment(parent) && parent.initializer === node ? parent.name.getText().replace(/['"]/g, '') : '';
  if (attribute === 'class' || attribute === 'className' || attribute === 'style') return false;
  if (KEYS.test(text) || NO_TEXT.test(text)) return false;
  if (!PHRASE.test(text) && !SEEN.has(attribute)) return false;
  for (let at: TypeScript.Node = node; at.parent; at = at.parent) {
    const { parent: above } = at;
    if (ts.isImportDeclaration(above) || ts.isTypeNode(above) || ts.isLiteralTypeNode(above)) return false;
    if (ts.isCallExpression(above) && above.expression !== at) {
      const callee = above.expression.getText();
      if (TRANSLATES.test(callee) || UNSEEN.test(callee)) return false;
    }
    if (ts.isBlock(above) || ts.isClassElement(above)) return true;
  }
  return true;
}

function offenders(name: string, source: string): string[] {
  const file = ts.createSourceFile(name, source, ts.ScriptTarget.Latest, true);
  const found: string[] = [];
  const visit = (node: TypeScript.Node) => {
    if (offends(node)) found.push(`${name}:${file.getLineAndCharacterOfPosition(node.getStart()).line + 1} ${node.getText()}`);
    ts.forEachChild(node, visit);
  };
  visit(file);
  return found;
}

test('each text that a reader sees can be translated', () => {
  const all = [...PLACES.flatMap(place => files(join(ROOT, place))), join(ROOT, 'ui/src/model/stream.ts')];
  assert.ok(all.length > 35);
  assert.deepEqual(all.flatMap(path => offenders(relative(ROOT, path), readFileSync(path, 'utf8'))), []);
});

test('a text that nobody can translate is found', () => {
  const source = `h('span', { title: 'rank', class: 'some name' }, 'no rank', t('all ranks'), \`rank \${1} is here\`); trans.__('Two words'); tell('Done');`;
  assert.deepEqual(offenders('x.ts', source), ["x.ts:1 'rank'", "x.ts:1 'no rank'", 'x.ts:1 `rank ${1} is here`', "x.ts:1 'Done'"]);
});

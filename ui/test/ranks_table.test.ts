import assert from 'node:assert/strict';
import { test } from 'node:test';
import type { RankRow } from '../src/model/store.ts';
import { RanksView } from '../src/view/ranks.ts';
import { fakePage, type FakeElement } from './page.ts';

function row(rank: number, more: Partial<RankRow> = {}): RankRow {
  return { rank, host: 'a', pid: 1, plane: 'shm', state: 'idle', reason: '', cell: '', spans: 0, timesLast: 0, heldUp: 0, worst: 0, wait: 0, work: 0, bandwidth: 0, ...more };
}

test('an update replaces the cells that differ, and leaves all others in the page', () => {
  const el = fakePage();
  const view = new RanksView(el);
  const cells = () => el.all('tbody')[0].all('tr').map(line => [...line.children] as FakeElement[]);
  view.update([row(0), row(1)], '2/2 ranks');
  const before = cells();
  view.update([row(0), row(1, { plane: 'gloo', slowest: true })], '2/2 ranks');
  const after = cells();
  assert.deepEqual(after[0].map((cell, i) => cell === before[0][i]), Array(9).fill(true));
  assert.deepEqual(after[1].map((cell, i) => cell === before[1][i]), [0, 1, 2, 3, 4, 5, 6, 7, 8].map(i => i !== 3));
  assert.deepEqual([after[1][3].textContent, el.all('tr')[2].className], ['gloo', 'hvd-strong']);
  view.dispose();
});

test('rows that come and go are those of their ranks', () => {
  const el = fakePage();
  const view = new RanksView(el);
  const lines = () => el.all('tbody')[0].all('tr');
  view.update([row(0), row(2, { slowest: true })], '');
  view.update([row(0), row(1), row(2)], '');
  assert.deepEqual(lines().map(line => [line.all('th')[0].textContent, line.className]), [['0', ''], ['1', ''], ['2', '']]);
  view.update([row(2)], '');
  assert.deepEqual(lines().map(line => line.all('th')[0].textContent), ['2']);
  view.dispose();
});

test('rows that are shown already are not made again', () => {
  const el = fakePage();
  const view = new RanksView(el);
  const rows = [row(0), row(1)];
  view.update(rows, '');
  let made = 0;
  const { createElement } = document;
  document.createElement = ((tag: string) => (made++, createElement.call(document, tag))) as never;
  view.update(rows, '2/2 ranks');
  assert.equal(made, 0);
  view.dispose();
});

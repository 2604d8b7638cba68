import assert from 'node:assert/strict';
import { test } from 'node:test';
import { fillBetween, fillLine, Layer } from '../src/draw/polyline.ts';
import { Pace } from '../src/view/charts.ts';

const INK = [200, 0, 0] as const;

function layer(width = 12, height = 10): Layer {
  const made = new Layer();
  made.clear(width, height);
  return made;
}

const column = (made: Layer, x: number) => Array.from({ length: made.height }, (_, y) => (made.opacity(x, y) > 127 ? '#' : '.')).join('');

test('a level line is as thick as it was asked for, in each column from its first point to its last', () => {
  const made = layer();
  fillLine(made, [2.5, 6.5], [5, 5], 2, INK);
  for (let x = 0; x < 12; x++) assert.equal(column(made, x), x >= 2 && x <= 6 ? '....##....' : '..........', `column ${x}`);
});

test('a steep line leaves no hole between columns', () => {
  const made = layer();
  fillLine(made, [1.5, 2.5, 3.5], [1, 9, 1], 1, INK);
  for (let y = 1; y < 9; y++) assert.ok([1, 2, 3].some(x => made.opacity(x, y) > 127), `row ${y}`);
  assert.equal(column(made, 5), '..........');
});

test('several points in one column cover all between the least and the greatest', () => {
  const made = layer();
  fillLine(made, [4.1, 4.5, 4.9], [2.5, 7.5, 3], 1, INK);
  assert.equal(column(made, 4), '..######..');
});

test('nothing is drawn across a gap, and what is not there is passed over', () => {
  const made = layer();
  fillLine(made, [1.5, 3.5, 5.5, 7.5, 9.5], [5, undefined, 5, null, 5], 2, INK);
  assert.equal(column(made, 3), '....##....');
  assert.equal(column(made, 7), '..........');
  assert.equal(column(made, 8), '..........');
  assert.equal(column(made, 9), '....##....');
});

test('lines that begin and end beside the picture go through it', () => {
  const made = layer();
  fillLine(made, [-50, 60], [5, 5], 2, INK);
  for (let x = 0; x < 12; x++) assert.equal(column(made, x), '....##....', `column ${x}`);
});

test('a part of a pixel is seen as much as it is covered', () => {
  const made = layer();
  made.column(3, 2.25, 4, INK, 1);
  assert.ok(Math.abs(made.opacity(3, 2) - 191) <= 1);
  assert.equal(made.opacity(3, 3), 255);
  assert.equal(made.opacity(3, 4), 0);
});

test('an area goes from one point to the next, and not over gaps', () => {
  const made = layer();
  fillBetween(made, [1.5, 4.5, 6.5], [2, null, 2], [6, 6, 6], INK, 0.8);
  assert.deepEqual([1, 3, 4, 6, 7].map(x => made.opacity(x, 4) > 127), [true, true, false, true, false]);
});

test('an area is not cut by points of other lines', () => {
  const made = layer();
  fillBetween(made, [1.5, 2.5, 3.5, 5.5], [2, undefined, 2, 2], [6, undefined, 6, 6], INK, 0.8);
  for (let x = 0; x < 8; x++) assert.equal(made.opacity(x, 4) > 127, x >= 1 && x <= 5, `column ${x}`);
});

test('what is cleared is empty, in the same size and in another', () => {
  const made = layer();
  fillLine(made, [0, 11], [5, 5], 2, INK);
  made.clear(12, 10);
  assert.equal(column(made, 4), '..........');
  fillLine(made, [0, 11], [5, 5], 2, INK);
  made.clear(8, 10);
  assert.equal(column(made, 4), '..........');
});

test('frames that are late make fewer pictures and rests, frames in time more', () => {
  const pace = new Pace();
  for (let i = 0; i < 100; i++) pace.told(16, i * 16);
  assert.equal(pace.most, 8);
  pace.told(60, 2000);
  assert.equal(pace.most, 4);
  assert.ok(!pace.ready(2100));
  assert.ok(pace.ready(2500));
  pace.hurry();
  assert.ok(pace.ready(2100));
});

test('however slow it is, one picture is drawn twice a second', () => {
  const pace = new Pace();
  let drawn = 0;
  for (let now = 0; now < 10_000; now += 16.7) {
    if (!pace.ready(now)) continue;
    drawn += pace.most;
    pace.told(900, now);
  }
  assert.ok(drawn >= 20, String(drawn));
});

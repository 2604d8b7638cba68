import assert from 'node:assert/strict';
import { mock, test } from 'node:test';
import membership, { CHANGE_WITHIN } from '../src/widget/membership.ts';
import ranks from '../src/widget/ranks.ts';
import strip from '../src/widget/strip.ts';
import { FakeModel, fakePage } from './page.ts';

const STRIP = { ranks: [], heading: '', title: '', elsewhere: '', made: 0, still: 'strip', ended: true, rate: '', note: '', stalled: '', elapsed: 0, silent: -1 };

for (const [name, widget] of Object.entries({ membership, ranks, strip })) {
  test(`${name}: a page that was away asks for the news that it missed`, () => {
    const el = fakePage();
    const model = new FakeModel({ still: name, rows: [], heading: '', failed: [], membership: null, pace: STRIP });
    const dispose = widget.render({ model: model as never, el });
    model.sent.length = 0;
    model.connect('connecting');
    assert.deepEqual(model.sent, []);
    model.connect('connected');
    assert.deepEqual(model.sent, [{ type: 'hello' }]);
    model.connect('connected');
    assert.equal(model.sent.length, 1);
    dispose();
  });
}

test('a change that the kernel does not answer gives its buttons back, and says so', async () => {
  mock.timers.enable({ apis: ['setTimeout', 'Date'] });
  try {
    const el = fakePage();
    const state = { headline: '', generation: 1, members: [{ rank: 0, state: 'lost', reason: '', host: '', pid: 0, since: 0, by: 'start' }], newcomers: [], cells: [], history: [], earlier: 0, ended: false, busy: '', replaceable: true, now: 0 };
    const model = new FakeModel({ still: 'membership', failed: [], membership: state });
    const dispose = membership.render({ model: model as never, el });
    const repair = el.all('button').find(one => one.textContent === 'Repair')!;
    assert.equal(repair.disabled, false);
    repair.click();
    assert.deepEqual([model.sent.at(-1)!.type, repair.disabled], ['do', true]);
    mock.timers.tick(CHANGE_WITHIN);
    await Promise.resolve();
    await Promise.resolve();
    assert.equal(repair.disabled, false);
    assert.match(el.textContent, /The kernel does not answer/);
    model.receive({ type: 'answer', request: model.sent.at(-1)!.request, text: 'repaired' });
    dispose();
  } finally {
    mock.timers.reset();
  }
});

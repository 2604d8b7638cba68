import assert from 'node:assert/strict';
import { test } from 'node:test';
import membership from '../src/widget/membership.ts';
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

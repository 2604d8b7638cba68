import { Liveness } from '../model/liveness.ts';
import type { MembershipState } from '../model/membership.ts';
import type { Failure } from '../model/store.ts';
import type { Model } from '../model/stream.ts';
import { t } from '../texts.ts';
import { MembershipView, type Wish } from '../view/membership.ts';
import { watchKernel } from './kernel.ts';
import { hideStill } from './still.ts';

/** As in the panel (labextension/src/panel.ts): ranks of a cluster may take that long (ms) to start. */
export const CHANGE_WITHIN = 600_000;

interface Answer {
  type: string;
  request: string;
  text?: string;
  error?: string;
}

/** Wishes that were sent to the kernel, until it answers. */
class Questions {
  private readonly model: Model;
  private readonly open = new Map<string, { resolve(text: string): void; reject(reason: Error): void }>();

  constructor(model: Model) {
    this.model = model;
    model.on('msg:custom', this.receive);
  }

  ask(wish: Wish): Promise<string> {
    const request = `${Date.now()}-${Math.random()}`; // of all pages that show this widget
    return new Promise((resolve, reject) => {
      // The answer is lost if it comes while the connection is away: the view's buttons would wait for it for ever.
      const timer = setTimeout(() => {
        if (this.open.delete(request)) reject(new Error(t('The kernel does not answer')));
      }, CHANGE_WITHIN);
      const done = <T>(act: (value: T) => void) => (value: T) => {
        clearTimeout(timer);
        act(value);
      };
      this.open.set(request, { resolve: done(resolve), reject: done(reject) });
      this.model.send({ type: 'do', request, ...wish });
    });
  }

  dispose(): void {
    this.model.off('msg:custom', this.receive);
  }

  private readonly receive = (message: Answer) => {
    const question = message.type === 'answer' ? this.open.get(message.request) : undefined;
    if (!question) return;
    this.open.delete(message.request);
    if (message.error === undefined) question.resolve(message.text ?? '');
    else question.reject(new Error(message.error));
  };
}

function render({ model, el }: { model: Model; el: HTMLElement }): () => void {
  const questions = new Questions(model);
  const view = new MembershipView(el, wish => questions.ask(wish));
  const update = () => view.update(model.get('membership') as MembershipState, model.get('failed') as Failure[]);
  // The kernel then sends all that it shows, and a new still: a page that was loaded again or was away has old ones.
  const hello = () => model.send({ type: 'hello' });
  const liveness: Liveness = new Liveness(() => view.stand(liveness), hello);
  let runs = false;
  const alive = (message: { type?: string; runs?: boolean }) => {
    if (message.type === 'alive') runs = message.runs === true;
    liveness.heard(runs);
  };
  const news = () => {
    update();
    liveness.heard(runs);
  };
  model.on('change:membership', news);
  model.on('change:failed', news);
  model.on('msg:custom', alive);
  update();
  const forget = watchKernel(model.widget_manager, String(model.get('still')), link => liveness.connected(link));
  hello();
  const showStill = hideStill(el, String(model.get('still')));
  return () => {
    showStill();
    forget();
    liveness.dispose();
    model.off('change:membership', news);
    model.off('change:failed', news);
    model.off('msg:custom', alive);
    questions.dispose();
    view.dispose();
  };
}

export default { render };

import type { Failure } from '../model/failures.ts';
import type { MembershipState } from '../model/membership.ts';
import { MembershipView, type Wish } from '../view/membership.ts';
import { hideStill } from './still.ts';
import type { Model } from './stream.ts';

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
      this.open.set(request, { resolve, reject });
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
  model.on('change:membership', update);
  model.on('change:failed', update);
  update();
  const showStill = hideStill(el, String(model.get('still')));
  return () => {
    showStill();
    model.off('change:membership', update);
    model.off('change:failed', update);
    questions.dispose();
    view.dispose();
  };
}

export default { render };

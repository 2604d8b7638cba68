import type { JSONObject } from '@lumino/coreutils';
import { KernelMessage, type Kernel } from '@jupyterlab/services';

// Messages between kernel and page; the kernel's side is widgets/panel.py and magics/panel_comms.py.

export const TARGET = 'hvdlab';
export const STREAM = 'hvdlab-stream';
export const REQUESTS = 'hvdlab-requests';

/** The pool of the notebook, whichever that is. */
export const OWN = '';

/** A pool that a notebook can show. */
export interface Pool extends JSONObject {
  id: string;
  kind: 'own' | 'variable' | 'kept';
  name: string;
  size: number;
}

/** What comes from the kernel, by `type`. */
export type FromKernel =
  | { type: 'here'; protocol: number }
  | { type: 'nothing'; pool: string; text?: string }
  | { type: 'rows'; pool: string; recording: string }
  | ({ type: 'answer'; request: string | null; error?: string } & JSONObject);

const PATIENCE = 6000; // ms; the page itself waits 3 s for the word of a kernel that is busy

/** Says things to a kernel so that they arrive also while a cell runs, where the kernel can do that. */
export class SubshellChannel {
  private subshell: Promise<string | null> | null = null;
  private readonly kernel: Kernel.IKernelConnection;

  constructor(kernel: Kernel.IKernelConnection) {
    this.kernel = kernel;
  }

  /** Whether the kernel knows a comm target, as far as it answers. */
  async knows(target: string): Promise<boolean> {
    const { kernel } = this;
    const idle = kernel.status === 'idle';
    const content = { target_name: target };
    const request = async () => kernel.sendShellMessage((await this.message('comm_info_request', content)) as never, true, true).done as Promise<KernelMessage.ICommInfoReplyMsg>;
    const reply = await (idle ? kernel.requestCommInfo(content) : request());
    const known = reply.content.status === 'ok' && Object.keys(reply.content.comms).length > 0;
    if (!known && !idle) await this.close();
    return known;
  }

  async say(comm: string, data: JSONObject): Promise<void> {
    const message = await this.message('comm_msg', { comm_id: comm, data });
    if (!this.kernel.isDisposed) this.kernel.sendShellMessage(message as never, false, true);
  }

  private async message(msgType: string, content: object): Promise<KernelMessage.IShellMessage> {
    const { kernel } = this;
    this.subshell ??= this.open();
    const subshellId = await this.subshell;
    const options = { msgType, channel: 'shell', username: kernel.username, session: kernel.clientId, content, ...(subshellId ? { subshellId } : {}) };
    return KernelMessage.createMessage(options as never) as unknown as KernelMessage.IShellMessage;
  }

  /** A subshell that an earlier page of this tab made, or a new one; `null` if the kernel has none. */
  private async open(): Promise<string | null> {
    const { kernel } = this;
    // A busy kernel does not report its features: try a subshell over the control channel, which is never busy.
    const idle = kernel.status === 'idle';
    if (idle && !(await kernel.info).supported_features?.includes('kernel subshells')) return null;
    if (!idle && (await kernel.spec)?.language !== 'python') return null;
    const known = sessionStorage.getItem(this.key);
    if (known) {
      const there = await this.control('list_subshell_request');
      if ((there?.subshell_id as string[] | undefined)?.includes(known)) return known;
    }
    const made = (await this.control('create_subshell_request'))?.subshell_id;
    if (typeof made !== 'string') return null;
    sessionStorage.setItem(this.key, made);
    return made;
  }

  private async close(): Promise<void> {
    const id = await this.subshell;
    this.subshell = null;
    sessionStorage.removeItem(this.key);
    if (id) await this.control('delete_subshell_request', { subshell_id: id });
  }

  private get key(): string {
    return `hvdlab:subshell:${this.kernel.id}`;
  }

  private async control(msgType: string, content: object = {}): Promise<Record<string, unknown> | null> {
    const { kernel } = this;
    const request = KernelMessage.createMessage({ msgType, channel: 'control', username: kernel.username, session: kernel.clientId, content } as never);
    const future = kernel.sendControlMessage(request as never, true, true);
    const silent = new Promise<null>(resolve => setTimeout(resolve, PATIENCE, null));
    // Kernels without subshells do not answer at all.
    const reply = await Promise.race([future.done, silent]).catch(() => null);
    if (!reply) future.dispose();
    return (reply?.content as Record<string, unknown> | undefined) ?? null;
  }
}

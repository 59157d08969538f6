// What the TypeScript programs share: a job comes in, what was received goes out. The same as jobs.py.

import { readFileSync } from "node:fs";

const CLOSE_MS = 5000;

class Job {
  constructor(spec) {
    Object.assign(this, spec);
    this.received = {
      cell: spec.cell, progress: [], logs: [], markers: [], outcome: "waiting", text: null, error: null, elapsed: 0,
    };
    this.isOver = false;
    this.lastLogCame = new Promise((resolve) => (this.onLastLog = resolve));
  }

  onProgress = ({ progress }) => this.received.progress.push(progress);

  onLog = ({ params: { data } }) => {
    if (typeof data !== "string") {
      this.received.markers.push(data.reason);
      return;
    }
    this.received.logs.push(data);
    if (data === this.last_log) this.onLastLog();
  };

  async record(call) {
    const begin = performance.now();
    const make = async () => {
      try {
        const text = await call();
        if (this.isOver) return;
        this.received.text = text;
        this.received.outcome = "result";
      } catch (error) {
        if (this.isOver) return;
        this.fail(error);
      }
      this.received.elapsed = Math.round(performance.now() - begin) / 1000;
      if (this.last_log !== null) await this.lastLogCame;
    };
    await Promise.race([make(), after(this.patience * 1000)]);
    this.report();
  }

  report(error) {
    if (this.isOver) return;
    this.isOver = true;
    if (error !== undefined) this.fail(error);
    process.stdout.write(JSON.stringify(this.received) + "\n");
  }

  fail(error) {
    this.received.outcome = "error";
    this.received.error = { type: error.constructor.name, message: error.message, data: error.data ?? null };
  }
}

const after = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

// `use` opens a session, makes the call through `job.record`, and closes; `packages` are whose versions come first.
export async function main(use, ...packages) {
  const versions = {};
  for (const name of packages) {
    const manifest = new URL(`./node_modules/${name}/package.json`, import.meta.url);
    versions[name] = JSON.parse(readFileSync(manifest, "utf8")).version;
  }
  process.stdout.write(JSON.stringify({ versions }) + "\n");
  const specs = JSON.parse(readFileSync(0, "utf8"));
  await Promise.all(
    specs.map(async (spec) => {
      const job = new Job(spec);
      const use_it = use(job).catch((error) => job.report(error));
      await Promise.race([use_it, after(spec.patience * 1000 + CLOSE_MS)]);
      job.report();
    }),
  );
  process.stdout.write("", () => process.exit(0)); // Without waiting for what a client has left running.
}

// The official TypeScript SDK, 1.x: `@modelcontextprotocol/sdk`.

import { Client } from "@modelcontextprotocol/sdk/client/index.js";
import { StreamableHTTPClientTransport } from "@modelcontextprotocol/sdk/client/streamableHttp.js";
import { LoggingMessageNotificationSchema } from "@modelcontextprotocol/sdk/types.js";
import { main } from "./jobs.mjs";

await main(async (job) => {
  const client = new Client({ name: "matrix", version: "1" });
  client.setNotificationHandler(LoggingMessageNotificationSchema, job.onLog);
  await client.connect(new StreamableHTTPClientTransport(new URL(job.url)));
  await job.record(async () => {
    const call = { name: job.tool, arguments: job.arguments };
    return (await client.callTool(call, undefined, { onprogress: job.onProgress })).content[0].text;
  });
  await client.close();
}, "@modelcontextprotocol/sdk");

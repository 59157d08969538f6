// The official TypeScript SDK, 2.x: `@modelcontextprotocol/client`.

import { Client, StreamableHTTPClientTransport } from "@modelcontextprotocol/client";
import { main } from "./jobs.mjs";

await main(async (job) => {
  const client = new Client({ name: "matrix", version: "1" });
  client.setNotificationHandler("notifications/message", job.onLog);
  await client.connect(new StreamableHTTPClientTransport(new URL(job.url)));
  await job.record(async () => {
    const call = { name: job.tool, arguments: job.arguments };
    return (await client.callTool(call, { onprogress: job.onProgress })).content[0].text;
  });
  await client.close();
}, "@modelcontextprotocol/client");

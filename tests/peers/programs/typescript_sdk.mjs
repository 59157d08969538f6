// The TypeScript SDK 1.x with its example event store, served as its example `ssePollingExample` serves it.
import { randomUUID } from 'node:crypto';
import { createMcpExpressApp } from '@modelcontextprotocol/sdk/server/express.js';
import { McpServer } from '@modelcontextprotocol/sdk/server/mcp.js';
import { StreamableHTTPServerTransport } from '@modelcontextprotocol/sdk/server/streamableHttp.js';
import { InMemoryEventStore } from '@modelcontextprotocol/sdk/examples/shared/inMemoryEventStore.js';
import { isInitializeRequest } from '@modelcontextprotocol/sdk/types.js';
import { z } from 'zod';

const sleep = milliseconds => new Promise(resolve => setTimeout(resolve, milliseconds));

function makeServer() {
    const server = new McpServer({ name: 'typescript', version: '1.32.2' });
    const shape = {
        events: z.number().default(8),
        interval_seconds: z.number().default(0.1),
        padding_bytes: z.number().default(0),
        close_after: z.number().default(0)
    };
    server.tool('count', 'The tool.', shape, async ({ events, interval_seconds, padding_bytes, close_after }, extra) => {
        const message = 'x'.repeat(padding_bytes);
        for (let number = 1; number <= events; number++) {
            await sleep(1000 * interval_seconds);
            const params = { progressToken: extra._meta.progressToken, progress: number, total: events, message };
            await extra.sendNotification({ method: 'notifications/progress', params });
            if (number === close_after) extra.closeSSEStream();
        }
        await server.server.sendToolListChanged();
        return { content: [{ type: 'text', text: `counted to ${events}` }] };
    });
    return server;
}

const app = createMcpExpressApp();
const eventStore = new InMemoryEventStore();
const transports = new Map();

app.all('/mcp', async (request, response) => {
    const sessionId = request.headers['mcp-session-id'];
    if (sessionId !== undefined) {
        const transport = transports.get(sessionId);
        if (transport !== undefined) return transport.handleRequest(request, response, request.body);
        const error = { code: -32001, message: 'Session not found' };
        return response.status(404).json({ jsonrpc: '2.0', error, id: null });
    }
    if (!isInitializeRequest(request.body)) {
        const error = { code: -32000, message: 'Bad Request: No valid session ID provided' };
        return response.status(400).json({ jsonrpc: '2.0', error, id: null });
    }
    const transport = new StreamableHTTPServerTransport({
        sessionIdGenerator: randomUUID,
        eventStore,
        retryInterval: 200,
        onsessioninitialized: id => transports.set(id, transport)
    });
    transport.onclose = () => transports.delete(transport.sessionId);
    await makeServer().connect(transport);
    await transport.handleRequest(request, response, request.body);
});

const listener = app.listen(0, '127.0.0.1', () => console.log(`http://127.0.0.1:${listener.address().port}/mcp`));

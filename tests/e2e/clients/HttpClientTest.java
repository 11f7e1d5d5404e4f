// Drive the gateway with Java's own HTTP client; prints one JSON object of findings.
//
// By default it asks each plain server to upgrade to HTTP/2 (`Connection: Upgrade, HTTP2-Settings`,
// `Upgrade: h2c`), also with a POST: Spring AI and LangChain4j do so, as they use it.
import java.io.BufferedReader;
import java.io.InputStream;
import java.io.InputStreamReader;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.stream.Collectors;

public class HttpClientTest {
    static String url, key, model;
    static final HttpClient client = HttpClient.newHttpClient();
    static final Map<String, String> found = new LinkedHashMap<>();

    static HttpRequest ask(String path, String body, String key) {
        return HttpRequest.newBuilder(URI.create(url + path))
            .header("Authorization", "Bearer " + key)
            .header("Content-Type", "application/json")
            .POST(HttpRequest.BodyPublishers.ofString(body))
            .build();
    }

    static String chat(String model, String content, int tokens, boolean stream) {
        return "{\"model\":\"" + model + "\",\"max_tokens\":" + tokens + ",\"stream\":" + stream
            + ",\"messages\":[{\"role\":\"user\",\"content\":\"" + content + "\"}]}";
    }

    // The SDKs' reading is not ours to test here: what came, by what is in it.
    static String told(HttpResponse<String> reply, String... words) {
        StringBuilder all = new StringBuilder("[" + reply.statusCode() + ",\"" + reply.version() + "\"");
        for (String word : words) all.append(",").append(reply.body().contains(word));
        return all.append("]").toString();
    }

    static HttpResponse<String> send(HttpRequest request) throws Exception {
        return client.send(request, HttpResponse.BodyHandlers.ofString());
    }

    public static void main(String[] args) throws Exception {
        url = args[0]; key = args[1]; model = args[2];
        HttpRequest models = HttpRequest.newBuilder(URI.create(url + "/v1/models")).header("Authorization", "Bearer " + key).build();
        found.put("models", told(send(models), "\"id\":\"" + model + "\""));
        String path = "/v1/chat/completions";
        found.put("chat", told(send(ask(path, chat(model, "hello", 5, false), key)), "\"finish_reason\":\"length\"", "\"completion_tokens\":5"));
        found.put("stream", told(send(ask(path, chat(model, "hello", 5, true), key)), "\"finish_reason\":\"length\"", "data: [DONE]"));
        // A body of many frames, behind the head that asks for another protocol.
        found.put("large", told(send(ask(path, chat(model, "word ".repeat(3000), 5, false), key)), "\"completion_tokens\":5"));
        found.put("no_model", told(send(ask(path, chat("none", "hello", 5, false), key)), "\"model_not_found\""));
        found.put("bad_key", told(send(ask("/v1/embeddings", "{\"model\":\"" + model + "\",\"input\":\"x\"}", "gw_wrong")), "\"invalid_api_key\""));
        found.put("too_long", told(send(ask(path, chat(model, "word ".repeat(200000), 5, false), key)), "\"context_length_exceeded\""));
        HttpResponse<InputStream> long_ = client.send(ask(path, chat(model, "hello", 3000, true), key), HttpResponse.BodyHandlers.ofInputStream());
        try (BufferedReader lines = new BufferedReader(new InputStreamReader(long_.body()))) {
            found.put("left", String.valueOf(lines.readLine().startsWith("data: {")));
        }
        System.out.println(found.entrySet().stream().map(each -> "\"" + each.getKey() + "\":" + each.getValue()).collect(Collectors.joining(",", "{", "}")));
    }
}

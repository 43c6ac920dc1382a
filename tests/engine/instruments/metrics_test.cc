// What is served at /metrics, and that a real Prometheus scrapes it.
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <thread>

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <weft/base/error.h>
#include <weft/engine/instruments/metrics.h>
#include <weft/engine/launch/process.h>
#include <weft/profiling/trace/operation.h>

namespace weft::instruments {
namespace {

using testing::HasSubstr;

// One HTTP/1.0 request; "" where nobody listens.
std::string get(int port, const std::string& path) {
  const int descriptor = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  std::string text;
  if (::connect(descriptor, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0) {
    const std::string request = "GET " + path + " HTTP/1.0\r\nHost: localhost\r\n\r\n";
    [[maybe_unused]] const auto written = ::write(descriptor, request.data(), request.size());
    char buffer[4096];
    for (ssize_t count = 0; (count = ::read(descriptor, buffer, sizeof buffer)) > 0;)
      text.append(buffer, static_cast<std::size_t>(count));
  }
  ::close(descriptor);
  return text;
}

// A process serves once: what is counted, and where.
int serve() {
  static const int served_at = [] {
    const int port = launch::free_port();
    serve_metrics("127.0.0.1:" + std::to_string(port), 5);
    const trace::Member member = trace::Member::join({"group", "default", 5, {}});
    const trace::About about{.name = "all_reduce", .bytes = 4096};
    trace::Operation::begin(member, trace::Kind::Collective, about).end();
    trace::Operation::begin(member, trace::Kind::Collective, about).fail(Error(Blame::PeerLost, "gone"));
    static_cast<void>(trace::Operation::begin(member, trace::Kind::Call, {.name = "f"}));
    trace::step(5);
    return port;
  }();
  return served_at;
}

TEST(Metrics, APortThatIsTakenIsAnErrorThatNamesIt) {
  const int taken = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t bytes = sizeof address;
  ASSERT_EQ(::bind(taken, reinterpret_cast<const sockaddr*>(&address), bytes), 0);
  ASSERT_EQ(::listen(taken, 1), 0);
  ASSERT_EQ(::getsockname(taken, reinterpret_cast<sockaddr*>(&address), &bytes), 0);
  const std::string where = "127.0.0.1:" + std::to_string(ntohs(address.sin_port));
  try {
    serve_metrics(where, 0);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_THAT(error.text(), HasSubstr(where));
  }
  ::close(taken);
}

TEST(Metrics, CountOperationsBytesErrorsAndTimes) {
  const std::string text = get(serve(), "/metrics");
  EXPECT_THAT(text, HasSubstr("200 OK"));
  EXPECT_THAT(text, HasSubstr("weft_operations_total{rank=\"5\",kind=\"collective\",name=\"all_reduce\"} 2"));
  EXPECT_THAT(text, HasSubstr("weft_bytes_total{rank=\"5\",kind=\"collective\",name=\"all_reduce\"} 8192"));
  EXPECT_THAT(text, HasSubstr("weft_errors_total{rank=\"5\",blame=\"PeerLost\",kind=\"collective\"} 1"));
  EXPECT_THAT(text, HasSubstr("weft_in_flight{rank=\"5\",kind=\"call\"} 1"));
  EXPECT_THAT(text, HasSubstr("weft_in_flight{rank=\"5\",kind=\"collective\"} 0"));
  EXPECT_THAT(text, HasSubstr("weft_operation_seconds_count{rank=\"5\",kind=\"collective\"} 2"));
  EXPECT_THAT(text, HasSubstr("weft_steps_total{rank=\"5\"} 1"));
}

TEST(Metrics, AreScrapedByPrometheus) {
  if (std::system("command -v prometheus > /dev/null 2>&1") != 0)
    GTEST_SKIP() << "no prometheus: install it to have /metrics scraped by it";
  std::string folder = std::filesystem::temp_directory_path() / "weft-prometheus-XXXXXX";
  ::mkdtemp(folder.data());
  const int port = serve();
  const int own = launch::free_port();
  std::ofstream(folder + "/prometheus.yml") << "global: {scrape_interval: 1s, scrape_timeout: 1s}\nscrape_configs:\n- "
                                               "job_name: weft\n  static_configs:\n  - targets: ['127.0.0.1:"
                                            << port << "']\n";
  const pid_t child = ::fork();
  if (child == 0) {
    const std::string out = folder + "/log";
    if (std::freopen(out.c_str(), "w", stderr) == nullptr) ::_exit(126);
    const std::string config = "--config.file=" + folder + "/prometheus.yml";
    const std::string data = "--storage.tsdb.path=" + folder + "/data";
    const std::string listen = "--web.listen-address=127.0.0.1:" + std::to_string(own);
    ::execlp("prometheus", "prometheus", config.c_str(), data.c_str(), listen.c_str(), static_cast<char*>(nullptr));
    ::_exit(127);
  }
  // Until it has scraped; ctest's time limit ends it.
  std::string answer;
  while (answer.find("\"8192\"") == std::string::npos) {
    answer = get(own, "/api/v1/query?query=weft_bytes_total");
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, WNOHANG), 0) << "prometheus has ended: " << launch::describe_status(status);
    std::this_thread::yield();
  }
  EXPECT_THAT(answer, HasSubstr("all_reduce"));
  ::kill(child, SIGTERM);
  ::waitpid(child, nullptr, 0);
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace weft::instruments

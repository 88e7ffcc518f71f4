// A program in C++ that runs a bundle, and single operations.
//
//     run_cpp cpu|cuda BUNDLE DIRECTORY    on DIRECTORY/in<i>.bin, 8 threads; writes
//                                          DIRECTORY/out<i>.bin
//     run_cpp ops                          operations against loops written out
//
// Exits with 0, with the status of what was thrown, or with 99 where results are wrong.

#include <array>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tracea.hpp"

namespace {

constexpr int kBroken = 99;
constexpr int kThreads = 8;

std::size_t bytes_of(const tracea::Spec& spec) {
  constexpr std::array<std::size_t, 8> kBytes = {4, 2, 2, 8, 8, 16, 1, 4};
  return spec.size() * kBytes[spec.dtype];
}

std::vector<char> read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// One run, with memory of its own.
std::vector<std::vector<char>> run(const tracea::Context& context,
                                   const tracea::Graph& graph, const std::string& directory) {
  std::vector<std::unique_ptr<tracea::Buffer>> memory;
  const auto place = [&](const tracea::Spec& spec) {
    memory.push_back(std::make_unique<tracea::Buffer>(context, bytes_of(spec)));
    return tracea::View(memory.back()->data(), spec.dtype, spec.shape, context.device());
  };
  std::vector<tracea::View> inputs, outputs;
  for (std::size_t i = 0; i < graph.num_inputs(); ++i) {
    const std::vector<char> host = read(directory + "/in" + std::to_string(i) + ".bin");
    inputs.push_back(place(graph.input(i)));
    context.copy(inputs.back().data(), host.data(), host.size());
    context.synchronize();
  }
  for (std::size_t i = 0; i < graph.num_outputs(); ++i) {
    outputs.push_back(place(graph.output(i)));
  }
  graph.run(inputs, outputs);
  std::vector<std::vector<char>> results;
  for (std::size_t i = 0; i < graph.num_outputs(); ++i) {
    results.emplace_back(bytes_of(graph.output(i)));
    context.copy(results.back().data(), outputs[i].data(), results.back().size());
  }
  context.synchronize();
  return results;
}

int run_in_threads(const tracea::Device& device, const std::string& bundle,
                   const std::string& directory) {
  const tracea::Context context(device, 2);
  const tracea::Graph graph(context, bundle);
  std::vector<std::vector<std::vector<char>>> all(kThreads);
  std::vector<std::thread> threads;
  for (auto& results : all) {
    threads.emplace_back([&] { results = run(context, graph, directory); });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& results : all) {
    if (results != all[0]) return kBroken;
  }
  for (std::size_t i = 0; i < all[0].size(); ++i) {
    std::ofstream file(directory + "/out" + std::to_string(i) + ".bin", std::ios::binary);
    file.write(all[0][i].data(), static_cast<std::streamsize>(all[0][i].size()));
  }
  return 0;
}

// ---- operations ---------------------------------------------------------------------

std::vector<float> numbers(std::size_t count, unsigned seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal;
  std::vector<float> all(count);
  for (float& x : all) x = normal(engine);
  return all;
}

bool is_close(const std::vector<float>& got, const std::vector<double>& want) {
  for (std::size_t i = 0; i < want.size(); ++i) {
    if (!(std::abs(got[i] - want[i]) <= 1e-4 * (1 + std::abs(want[i])))) {
      std::printf("element %zu is %g, not %g\n", i, got[i], want[i]);
      return false;
    }
  }
  return true;
}

bool matmul_is_right(const tracea::Context& context, bool transposed) {
  constexpr int m = 13, n = 37, k = 29;
  std::vector<float> x = numbers(m * k, 1), w = numbers(k * n, 2), b = numbers(n, 3), y(m * n);
  std::vector<double> want(m * n);
  for (int i = 0; i < m; ++i) {
    for (int j = 0; j < n; ++j) {
      double sum = b[j];
      for (int p = 0; p < k; ++p) sum += double(x[i * k + p]) * w[transposed ? j * k + p : p * n + j];
      want[i * n + j] = std::max(sum, 0.0);
    }
  }
  const tracea::View bias = tracea::view(b, {n});
  tracea::Epilogue epilogue;
  epilogue.bias = &bias;
  epilogue.activation = TRACEA_RELU;
  const tracea::View rhs =
      transposed ? tracea::view(w, {n, k}).transposed() : tracea::view(w, {k, n});
  tracea::matmul(context, tracea::view(x, {m, k}), rhs, tracea::view(y, {m, n}), epilogue);
  return is_close(y, want);
}

bool conv2d_is_right(const tracea::Context& context) {
  constexpr int size = 7, channels = 5, columns = 6, out = 4;  // stride 2, padding 1
  std::vector<float> x = numbers(size * size * channels, 4),
                     w = numbers(9 * channels * columns, 5), y(out * out * columns);
  std::vector<double> want(y.size());
  for (int i = 0; i < out; ++i) {
    for (int j = 0; j < out; ++j) {
      for (int o = 0; o < columns; ++o) {
        double sum = 0;
        for (int r = 0; r < 3; ++r) {
          for (int s = 0; s < 3; ++s) {
            const int h = 2 * i + r - 1, v = 2 * j + s - 1;
            if (h < 0 || v < 0 || h >= size || v >= size) continue;
            for (int c = 0; c < channels; ++c) {
              sum += double(x[(h * size + v) * channels + c]) *
                     w[((r * 3 + s) * channels + c) * columns + o];
            }
          }
        }
        want[(i * out + j) * columns + o] = sum;
      }
    }
  }
  tracea_conv2d_options options{};
  options.stride[0] = options.stride[1] = 2;
  options.padding[0] = options.padding[1] = 1;
  tracea::conv2d(context, tracea::view(x, {1, size, size, channels}),
                 tracea::view(w, {3, 3, channels, columns}),
                 tracea::view(y, {1, out, out, columns}), options);
  return is_close(y, want);
}

bool attention_is_right(const tracea::Context& context) {
  constexpr int length = 11, heads = 2, dim = 8;
  const tracea::Shape shape = {1, length, heads, dim};
  std::vector<float> q = numbers(length * heads * dim, 6), k = numbers(q.size(), 7),
                     v = numbers(q.size(), 8), o(q.size());
  std::vector<double> want(q.size());
  const auto at = [](int i, int h, int d) { return (i * heads + h) * dim + d; };
  for (int h = 0; h < heads; ++h) {
    for (int i = 0; i < length; ++i) {
      std::vector<double> weights(i + 1);
      double sum = 0;
      for (int j = 0; j <= i; ++j) {
        double score = 0;
        for (int d = 0; d < dim; ++d) score += double(q[at(i, h, d)]) * k[at(j, h, d)];
        sum += weights[j] = std::exp(score / std::sqrt(double(dim)));
      }
      for (int d = 0; d < dim; ++d) {
        for (int j = 0; j <= i; ++j) want[at(i, h, d)] += weights[j] / sum * v[at(j, h, d)];
      }
    }
  }
  tracea_attention_options options{};
  options.is_causal = 1;
  tracea::attention(context, tracea::view(q, shape), tracea::view(k, shape),
                    tracea::view(v, shape), tracea::view(o, shape), options);
  return is_close(o, want);
}

bool mistake_throws(const tracea::Context& context) {
  std::vector<float> x(6), y(6);
  try {
    tracea::matmul(context, tracea::view(x, {2, 3}), tracea::view(x, {2, 3}),
                   tracea::view(y, {2, 3}));
  } catch (const tracea::Error& error) {
    std::printf("%d %s\n", error.status(), error.what());
    return error.status() == TRACEA_INVALID;
  }
  return false;
}

int check_operations() {
  const tracea::Context context(tracea::cpu(), 3);
  const bool is_right = matmul_is_right(context, false) && matmul_is_right(context, true) &&
                        conv2d_is_right(context) && attention_is_right(context) &&
                        mistake_throws(context);
  return is_right ? 0 : kBroken;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  try {
    if (what == "ops") return check_operations();
    if (argc != 4) return kBroken;
    return run_in_threads(what == "cpu" ? tracea::cpu() : tracea::cuda(), argv[2], argv[3]);
  } catch (const tracea::Error& error) {
    std::printf("%d %s\n", error.status(), error.what());
    return error.status();
  }
}

// C++17 over tracea.h: owners that clean up, exceptions, views of arrays. Header only.
//
//     tracea::Context context(tracea::cpu());
//     tracea::Graph graph(context, "block.tracea");
//     std::vector<float> x(graph.input(0).size()), y(graph.output(0).size());
//     graph.run({tracea::view(x, graph.input(0).shape)},
//               {tracea::view(y, graph.output(0).shape)});
#ifndef TRACEA_HPP_
#define TRACEA_HPP_

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "tracea.h"

namespace tracea {

// What a call that failed throws: its status, and the sentence as what().
class Error : public std::runtime_error {
 public:
  Error(tracea_status status, const std::string& message)
      : std::runtime_error(message), status_(status) {}

  tracea_status status() const noexcept { return status_; }

 private:
  tracea_status status_;
};

inline void check(tracea_status status) {
  if (status != TRACEA_OK) throw Error(status, tracea_last_error());
}

using Device = tracea_device;

inline Device cpu() { return {TRACEA_CPU, 0}; }
inline Device cuda(int ordinal = 0) { return {TRACEA_CUDA, ordinal}; }

using Shape = std::vector<std::int64_t>;

inline std::size_t elements(const Shape& shape) {
  std::size_t size = 1;
  for (std::int64_t dim : shape) size *= static_cast<std::size_t>(dim);
  return size;
}

// The dtype of a C++ type; 16-bit floats are given by number instead.
template <typename T>
constexpr tracea_dtype dtype_of() {
  if constexpr (std::is_same_v<T, float>) return TRACEA_FLOAT32;
  else if constexpr (std::is_same_v<T, double>) return TRACEA_FLOAT64;
  else if constexpr (std::is_same_v<T, bool>) return TRACEA_BOOL;
  else {
    static_assert(std::is_same_v<T, std::int32_t>, "no dtype of tracea has this C++ type");
    return TRACEA_INT32;
  }
}

// A view of an array that somebody else owns. Its shape and strides are its own.
class View {
 public:
  View(void* data, tracea_dtype dtype, Shape shape, Device device = cpu(),
       Shape strides = {})
      : data_(data),
        dtype_(dtype),
        shape_(std::move(shape)),
        strides_(std::move(strides)),
        device_(device) {
    if (!strides_.empty() && strides_.size() != shape_.size()) {
      throw Error(TRACEA_INVALID, "a view has as many strides as dimensions, or none.");
    }
  }

  const Shape& shape() const noexcept { return shape_; }
  tracea_dtype dtype() const noexcept { return dtype_; }
  void* data() const noexcept { return data_; }

  // The last two dimensions swapped, over the same memory.
  View transposed() const {
    const std::size_t rank = shape_.size();
    if (rank < 2) throw Error(TRACEA_INVALID, "only matrices are transposed.");
    View other = *this;
    if (other.strides_.empty()) {
      other.strides_.assign(rank, 1);
      for (std::size_t i = rank - 1; i > 0; --i) {
        other.strides_[i - 1] = other.strides_[i] * shape_[i];
      }
    }
    std::swap(other.shape_[rank - 1], other.shape_[rank - 2]);
    std::swap(other.strides_[rank - 1], other.strides_[rank - 2]);
    return other;
  }

  tracea_tensor tensor() const noexcept {
    return {data_, shape_.data(), strides_.empty() ? nullptr : strides_.data(),
            static_cast<std::int32_t>(shape_.size()), dtype_, device_};
  }

 private:
  void* data_;
  tracea_dtype dtype_;
  Shape shape_, strides_;
  Device device_;
};

// Of a vector, a std::array or a std::span of numbers; their size must be the shape's.
template <typename Container>
View view(Container& numbers, Shape shape, Device device = cpu()) {
  using T = std::remove_cv_t<std::remove_reference_t<decltype(*numbers.data())>>;
  if (numbers.size() != elements(shape)) {
    throw Error(TRACEA_INVALID, "a view of " + std::to_string(numbers.size()) +
                                    " numbers has a shape of " +
                                    std::to_string(elements(shape)) + ".");
  }
  return View(const_cast<T*>(numbers.data()), dtype_of<T>(), std::move(shape), device);
}

// A device, and on a CPU the threads that share its work: 0 for one a core.
class Context {
 public:
  explicit Context(Device device = cpu(), int threads = 0) : device_(device) {
    tracea_context* made = nullptr;
    check(tracea_context_create(device, threads, &made));
    context_.reset(made, tracea_context_destroy);
  }

  Device device() const noexcept { return device_; }
  tracea_context* get() const noexcept { return context_.get(); }

  void copy(void* to, const void* from, std::size_t bytes,
            tracea_stream stream = nullptr) const {
    check(tracea_copy(get(), to, from, bytes, stream));
  }
  void synchronize(tracea_stream stream = nullptr) const {
    check(tracea_synchronize(get(), stream));
  }

 private:
  Device device_;
  std::shared_ptr<tracea_context> context_;  // graphs and buffers keep it alive
};

// Memory of a context's device.
class Buffer {
 public:
  Buffer(Context context, std::size_t bytes) : context_(std::move(context)), bytes_(bytes) {
    check(tracea_allocate(context_.get(), bytes, &memory_));
  }
  ~Buffer() { tracea_free(context_.get(), memory_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  void* data() const noexcept { return memory_; }
  std::size_t bytes() const noexcept { return bytes_; }

 private:
  Context context_;
  std::size_t bytes_;
  void* memory_ = nullptr;
};

// What a graph takes or gives.
struct Spec {
  std::string name;
  Shape shape;
  tracea_dtype dtype;

  std::size_t size() const { return elements(shape); }
};

// A bundle, loaded.
class Graph {
 public:
  Graph(Context context, const std::string& path) : context_(std::move(context)) {
    tracea_graph* made = nullptr;
    check(tracea_graph_load(context_.get(), path.c_str(), &made));
    graph_.reset(made, tracea_graph_destroy);
  }

  std::size_t num_inputs() const noexcept { return tracea_graph_num_inputs(get()); }
  std::size_t num_outputs() const noexcept { return tracea_graph_num_outputs(get()); }
  std::size_t workspace_bytes() const noexcept {
    return tracea_graph_workspace_bytes(get());
  }
  Spec input(std::size_t index) const { return spec(tracea_graph_input, index); }
  Spec output(std::size_t index) const { return spec(tracea_graph_output, index); }

  // Runs with a workspace of the caller's.
  void run(const std::vector<View>& inputs, const std::vector<View>& outputs,
           void* workspace, std::size_t bytes, tracea_stream stream = nullptr) const {
    const std::vector<tracea_tensor> in = tensors(inputs), out = tensors(outputs);
    check(tracea_graph_run(get(), in.data(), in.size(), out.data(), out.size(), workspace,
                           bytes, stream));
  }

  // Runs with a workspace that is allocated for this call, and waits for the results.
  void run(const std::vector<View>& inputs, const std::vector<View>& outputs,
           tracea_stream stream = nullptr) const {
    const Buffer workspace(context_, workspace_bytes());
    run(inputs, outputs, workspace.data(), workspace.bytes(), stream);
    context_.synchronize(stream);
  }

  tracea_graph* get() const noexcept { return graph_.get(); }

 private:
  using Describe = tracea_status (*)(const tracea_graph*, std::size_t, tracea_spec*);

  Spec spec(Describe describe, std::size_t index) const {
    tracea_spec found{};
    check(describe(get(), index, &found));
    return {found.name, Shape(found.shape, found.shape + found.rank),
            static_cast<tracea_dtype>(found.dtype)};
  }

  static std::vector<tracea_tensor> tensors(const std::vector<View>& views) {
    std::vector<tracea_tensor> all;
    for (const View& one : views) all.push_back(one.tensor());
    return all;
  }

  Context context_;
  std::shared_ptr<tracea_graph> graph_;
};

// ---- single operations; see tracea.h ------------------------------------------------

// Operands that may be left out.
struct Epilogue {
  const View* bias = nullptr;
  const View* residual = nullptr;
  tracea_activation activation = TRACEA_NONE;
};

namespace detail {

struct Optional {
  explicit Optional(const View* view) : given(view != nullptr) {
    if (given) tensor = view->tensor();
  }
  const tracea_tensor* get() const { return given ? &tensor : nullptr; }

  bool given;
  tracea_tensor tensor{};
};

}  // namespace detail

inline void matmul(const Context& context, const View& lhs, const View& rhs,
                   const View& out, const Epilogue& epilogue = {},
                   tracea_stream stream = nullptr) {
  const tracea_tensor l = lhs.tensor(), r = rhs.tensor(), o = out.tensor();
  const detail::Optional bias(epilogue.bias), residual(epilogue.residual);
  check(tracea_matmul(context.get(), &l, &r, bias.get(), residual.get(),
                      epilogue.activation, &o, stream));
}

inline void conv2d(const Context& context, const View& x, const View& w, const View& out,
                   tracea_conv2d_options options = {}, const Epilogue& epilogue = {},
                   tracea_stream stream = nullptr) {
  const tracea_tensor of_x = x.tensor(), of_w = w.tensor(), o = out.tensor();
  const detail::Optional bias(epilogue.bias), residual(epilogue.residual);
  if (epilogue.activation != TRACEA_NONE) options.activation = epilogue.activation;
  check(tracea_conv2d(context.get(), &of_x, &of_w, bias.get(), residual.get(), &options,
                      &o, stream));
}

inline void attention(const Context& context, const View& q, const View& k, const View& v,
                      const View& out, const tracea_attention_options& options = {},
                      const View* bias = nullptr, const View* mask = nullptr,
                      tracea_stream stream = nullptr) {
  const tracea_tensor of_q = q.tensor(), of_k = k.tensor(), of_v = v.tensor(),
                      o = out.tensor();
  const detail::Optional of_bias(bias), of_mask(mask);
  check(tracea_attention(context.get(), &of_q, &of_k, &of_v, of_bias.get(), of_mask.get(),
                         &options, &o, stream));
}

}  // namespace tracea

#endif  // TRACEA_HPP_

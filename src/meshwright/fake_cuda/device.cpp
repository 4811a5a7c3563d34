// A CUDA device without memory for a torch that was built for CPUs: what torch asks of a device before it computes.
//
// It is loaded before torch is imported, since torch looks for the hooks of CUDA once. Kernels are never run: tensors
// of the device are fake ones, and operators on them end in their shapes. What a build for CUDA decides by its
// kernels is decided here as it would be there: which operators there are (`TORCH_LIBRARY_IMPL`), and which kernel
// computes attention (`choose_attention`).
#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/env.h>
#include <torch/library.h>

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

const Device CUDA(DeviceType::CUDA, 0);

struct Guard final : public c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device exchangeDevice(Device) const override { return CUDA; }
  Device getDevice() const override { return CUDA; }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, CUDA); }
  Stream exchangeStream(Stream) const noexcept override { return Stream(Stream::DEFAULT, CUDA); }
  Stream getNewStream(Device, int) const override { return Stream(Stream::DEFAULT, CUDA); }
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};

struct Hooks final : public at::CUDAHooksInterface {
  Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
};

// Operators that decompose where they have no kernel. A test compares the list with torch's own of its kernels.
void no_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack*) {
  TORCH_CHECK(false, op.schema().name(), ": the device is fake and computes nothing");
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  for (const char* name : {"_fused_rms_norm", "silu_backward", "mish_backward"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&no_kernel>());
}

// Attention ------------------------------------------------------------------------------------------------------
//
// The rules of torch 2.13's `aten/src/ATen/native/transformers/cuda/sdp_utils.cpp` for dense inputs, with cuDNN 9.15.1
// or newer, as its packages for CUDA have it.

int major = 9, minor = 0;
bool ordered = false;  // as torch does: the order of preference is set once, when attention is first called

bool takes_half(const sdp::sdp_params& params) {
  constexpr std::array<at::ScalarType, 2> formats = {at::kHalf, at::kBFloat16};
  return sdp::check_tensor_dtype(params, formats, false);
}

template <bool gqa, bool one_by_one, bool singleton>
bool takes_rows(const sdp::sdp_params& params) {
  return sdp::check_tensor_shapes(params, false) && sdp::check_nonzero_sequence_lengths_dense(params, false) &&
      sdp::check_last_dim_stride_equals_1_dense<singleton>(params, false) &&
      sdp::check_batch_size_and_num_heads_dense<gqa, one_by_one>(params, false);
}

bool flash_takes(const sdp::sdp_params& params) {
  const auto d = params.query.size(-1);
  return at::globalContext().userEnabledFlashSDP() && takes_half(params) && major >= 8 && d <= 256 &&
      d == params.key.size(-1) && d == params.value.size(-1) && !params.attn_mask.has_value() &&
      !(params.is_causal && params.query.size(-2) != params.key.size(-2)) && takes_rows<true, true, true>(params);
}

bool efficient_takes(const sdp::sdp_params& params) {
  constexpr std::array<at::ScalarType, 3> formats = {at::kHalf, at::kFloat, at::kBFloat16};
  const auto d = params.query.size(-1), v = params.value.size(-1);
  const int64_t word = params.query.scalar_type() == at::kFloat ? 4 : 8;
  return at::globalContext().userEnabledMemEfficientSDP() && sdp::check_tensor_dtype(params, formats, false) &&
      d == params.key.size(-1) && d > 0 && v > 0 && d % word == 0 && v % word == 0 &&
      takes_rows<false, true, false>(params);
}

bool cudnn_takes(const sdp::sdp_params& params) {
  const int64_t most = major == 9 && minor == 0 ? 256 : 128;
  const auto d = params.query.size(-1), v = params.value.size(-1);
  const auto& context = at::globalContext();
  const bool allowed = context.userEnabledCuDNNSDP() &&
      (!context.deterministicAlgorithms() || context.deterministicAlgorithmsWarnOnly());
  return allowed && takes_half(params) && major >= 8 && d <= most && v <= most && d % 8 == 0 && v % 8 == 0 &&
      params.key.size(-2) != 1 && !(params.query.size(-2) == 1 && params.dropout > 0) &&
      sdp::check_attn_mask_shape(params, false) && takes_rows<true, false, true>(params);
}

int64_t choose_attention(
    const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& mask, double dropout, bool causal,
    std::optional<double>, bool gqa) {
  auto& context = at::globalContext();
  using at::SDPBackend;
  if (!ordered) {
    ordered = true;
    const bool cudnn = (major == 9 || major == 10) && minor == 0 &&
        c10::utils::check_env("TORCH_CUDNN_SDPA_DEPRIORITIZED") != true;
    if (cudnn)
      context.setSDPPriorityOrder({static_cast<int64_t>(SDPBackend::cudnn_attention),
                                   static_cast<int64_t>(SDPBackend::flash_attention),
                                   static_cast<int64_t>(SDPBackend::efficient_attention),
                                   static_cast<int64_t>(SDPBackend::math)});
  }
  const sdp::sdp_params params{q, k, v, mask, dropout, causal, gqa};
  for (const auto backend : context.sDPPriorityOrder()) {
    if ((backend == SDPBackend::cudnn_attention && cudnn_takes(params)) ||
        (backend == SDPBackend::flash_attention && flash_takes(params)) ||
        (backend == SDPBackend::efficient_attention && efficient_takes(params)) ||
        (backend == SDPBackend::math && context.userEnabledMathSDP()))
      return static_cast<int64_t>(backend);
  }
  return static_cast<int64_t>(SDPBackend::error);
}

}  // namespace

namespace at {
using FakeHooks = Hooks;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, FakeHooks)
}  // namespace at

extern "C" {

// Puts the device in its place, once; true if torch sees it.
bool meshwright_fake_cuda() {
  c10::impl::device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)].store(new Guard());
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose_attention);
  return at::detail::getCUDAHooks().hasCUDA();
}

void meshwright_set_capability(int of_major, int of_minor) {
  major = of_major;
  minor = of_minor;
  ordered = false;
  at::globalContext().setSDPPriorityOrder({static_cast<int64_t>(at::SDPBackend::flash_attention),
                                           static_cast<int64_t>(at::SDPBackend::efficient_attention),
                                           static_cast<int64_t>(at::SDPBackend::math),
                                           static_cast<int64_t>(at::SDPBackend::cudnn_attention)});
}
}

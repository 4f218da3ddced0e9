# cmake -DNVCC=... -DSOURCE=peer.cu -DOUT=peer.fatbin -P fatbin.cmake
#
# Builds one file with code for each architecture below that this nvcc knows, and PTX of the newest
# for later GPUs. If nvcc fails, its message is shown and the file is left out; the rest of the
# package works without it.
execute_process(COMMAND ${NVCC} --list-gpu-arch OUTPUT_VARIABLE known ERROR_QUIET)
set(targets)
foreach(number 80 90 100)
  if(known MATCHES "compute_${number}[^0-9]")
    list(APPEND targets -gencode arch=compute_${number},code=sm_${number})
    set(newest ${number})
  endif()
endforeach()
if(NOT newest)
  message("${NVCC} knows none of sm_80, sm_90 and sm_100; the kernels for peer memory are left out")
  return()
endif()
execute_process(
  # no contraction to FMA, as on the host, so that a reduction rounds as in the simulator
  COMMAND ${NVCC} -std=c++17 -O3 --fmad=false --threads 0 -fatbin ${targets}
          -gencode arch=compute_${newest},code=compute_${newest} -o ${OUT} ${SOURCE}
  TIMEOUT 180  # s; takes 20
  RESULT_VARIABLE failed)
if(failed)
  message("${NVCC} cannot compile ${SOURCE}; the kernels for peer memory are left out")
endif()

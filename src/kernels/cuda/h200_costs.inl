// Made by bench/fit_gpu_costs.py from bench/results/h200/gemm-kernels.json: tokens, rows, split; µs fixed, a pass, a step, a row block.
    {16, 64, 1, 2.02f, 0.80f, 0.008f, 0.1997f},  // 48 measured, 1 % off
    {16, 64, 2, 0.35f, 4.36f, 0.796f, 0.1827f},  // 48 measured, 1 % off
    {16, 128, 1, 0.94f, 1.93f, 0.436f, 0.1417f},  // 48 measured, 4 % off
    {16, 128, 2, 0.03f, 4.86f, 0.004f, 0.1456f},  // 48 measured, 3 % off
    {16, 256, 1, 2.14f, 0.66f, 0.321f, 0.1479f},  // 48 measured, 8 % off
    {32, 64, 1, 1.64f, 1.30f, 0.885f, 0.0976f},  // 40 measured, 3 % off
    {32, 64, 2, 0.43f, 4.46f, 0.902f, 0.0166f},  // 40 measured, 3 % off
    {32, 128, 1, 3.94f, 0.82f, 0.003f, 0.1743f},  // 40 measured, 9 % off
    {32, 128, 2, 0.01f, 5.05f, 0.085f, 0.1685f},  // 40 measured, 3 % off
    {32, 256, 1, 3.83f, 0.13f, 0.318f, 0.1782f},  // 40 measured, 9 % off
    {64, 256, 1, 2.53f, 0.30f, 0.395f, 0.2449f},  // 32 measured, 9 % off
    {64, 256, 4, 0.02f, 6.15f, 0.866f, 0.0053f},  // 32 measured, 4 % off
    {128, 192, 1, 0.16f, 1.85f, 0.588f, 0.4004f},  // 24 measured, 21 % off
    {128, 192, 2, 0.03f, 6.47f, 0.477f, 0.3451f},  // 24 measured, 7 % off
    {128, 192, 4, 0.02f, 7.94f, 0.993f, 0.1072f},  // 24 measured, 5 % off
    {256, 128, 1, 0.69f, 1.53f, 1.246f, 0.9304f},  // 16 measured, 28 % off
    {256, 128, 2, 0.01f, 10.99f, 1.477f, 0.0493f},  // 16 measured, 16 % off
